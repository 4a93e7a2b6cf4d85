// A directory as Hugging Face's transformers write one: config.json, and the weights in
// model.safetensors, or in several such files that model.safetensors.index.json lists.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/item.h"

namespace fsdp::checkpoint {

// Whether `dir` is such a directory, and no checkpoint of ours. What is in the files is not looked
// at.
bool is_hugging_face(const std::filesystem::path& dir);

struct ListedTensor {
  std::string file;  // in the directory
  StoredTensor stored;
  int64_t bytes = 0;
};

struct HuggingFaceListing {
  std::map<std::string, ListedTensor> tensors;  // by the name that our models give them
  std::vector<std::string> files;               // that hold them
  std::vector<std::string> left_out;            // tensors that no model of ours has a use for
};

// What the directory holds: the headers of all files are read and checked. A file or tensor that
// the index lists and that is not there is an Error that names both.
HuggingFaceListing list_hugging_face(const std::filesystem::path& dir);

// The name that our models give to a tensor that a file calls `name`; empty for what they compute
// themselves. All that files of different ages call differently is put right here:
//   GPT-2 without a head has no "transformer." before its names, Llama no "model."
//   GPT-2's masks (attn.bias, attn.masked_bias) and Llama's frequencies (rotary_emb.inv_freq) were
//   stored until transformers noticed that they are no weights
std::string name_in_model(const std::string& name);

}  // namespace fsdp::checkpoint
