// What the commands under `fsdp ckpt` read from, and what they know about it.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/source.h"
#include "fsdp/models/hugging_face.h"

namespace fsdp::cli {

struct CheckpointSource {
  std::filesystem::path dir;  // of the checkpoint itself
  std::filesystem::path run;  // that it lies in; empty: none
  bool hugging_face = false;
  std::unique_ptr<checkpoint::Source> source;
};

// Opens a run's directory, its checkpoints folder, one checkpoint, or a Hugging Face directory.
CheckpointSource open_source(const std::string& where);

struct SourceModel {
  models::AnyConfig config;
  int64_t max_positions = 0;  // 0: nobody said
  models::SpecialTokens tokens;
  std::string generation = "";  // generation_config.json; empty: there is none
};
// The model that is in it. An Error where it does not say so, or is none that others know.
SourceModel model_of(const CheckpointSource& from);

// An Error unless the model's tensors are those that its config asks for; a tied head may be
// absent.
void check_model(const CheckpointSource& from, const models::AnyConfig& config);

// The folder with the tokenizer.json that belongs to it; empty: none is known.
std::filesystem::path tokenizer_folder(const CheckpointSource& from);

// A run's folder with what the Hugging Face directory it was begun from said; empty: none.
std::filesystem::path origin_folder(const CheckpointSource& from);

// "bf16", "fp32", "fp16", or "keep" for none.
std::optional<at::ScalarType> parse_dtype(const std::string& name);

// The names below "model." of a checkpoint, without that. An Error where there are none.
std::vector<std::string> model_names(const checkpoint::Source& source);

}  // namespace fsdp::cli
