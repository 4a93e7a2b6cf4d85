// A directory as Hugging Face's transformers writes it: config.json, and the weights in
// model.safetensors or in several such files that model.safetensors.index.json lists.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/item.h"

namespace fsdp::checkpoint {

inline constexpr const char* kWeightsFile = "model.safetensors";
inline constexpr const char* kWeightsIndex = "model.safetensors.index.json";

// A directory of adapters as PEFT writes it.
inline constexpr const char* kPeftConfig = "adapter_config.json";
inline constexpr const char* kPeftWeights = "adapter_model.safetensors";
inline constexpr const char* kPeftPrefix = "base_model.model.";  // of names in the weights

// Whether `dir` is such a directory, and not a checkpoint of ours or of the other kind. A model's
// directory may have adapters as well, and adapters' the model's config.json: weights decide.
// Doesn't open the files.
bool is_hugging_face(const std::filesystem::path& dir);
bool is_peft(const std::filesystem::path& dir);

struct ListedTensor {
  std::string file;  // in the directory
  StoredTensor stored;
  int64_t bytes = 0;
};

struct HuggingFaceListing {
  std::map<std::string, ListedTensor> tensors;  // by their name in our models
  std::vector<std::string> files;               // files that hold them
  std::vector<std::string> left_out;            // tensors that our models don't use
};

// Lists what a directory of either kind holds; reads and checks the headers of all files. A file or
// tensor that is in the index but missing is an Error that names both.
HuggingFaceListing list_hugging_face(const std::filesystem::path& dir);

// The name in our models of a tensor that a file calls `name`; empty for tensors that our models
// compute themselves. Handles the differences between files of different versions:
//   GPT-2 without a head has no "transformer." before its names, Llama no "model."
//   PEFT has "base_model.model." before all names
//   older files store GPT-2's masks (attn.bias, attn.masked_bias) and Llama's frequencies
//   (rotary_emb.inv_freq), which aren't weights
//   Mixtral's files say block_sparse_moe for mlp, and w1, w3, w2 for gate_proj, up_proj, down_proj
std::string name_in_model(const std::string& name);

// Files hold each expert's matrices, our models one parameter for a product of all of them.
struct ExpertMatrix {
  std::string parameter;  // "model.layers.0.mlp.experts.gate_up_proj"
  int64_t expert = 0;
  bool second = false;  // the up projection, which comes after all rows of the gate
};
// nullopt: the tensor isn't an expert's matrix. `name` as name_in_model() returns it.
std::optional<ExpertMatrix> expert_matrix(const std::string& name);

}  // namespace fsdp::checkpoint
