// What the commands of `fsdp ckpt` convert from: a checkpoint or a Hugging Face directory.
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
  std::filesystem::path run;  // it belongs to; empty: none
  bool hugging_face = false;
  bool peft = false;  // adapters alone, in a directory as PEFT writes it
  std::unique_ptr<checkpoint::Source> source;
};

// Opens a run's directory, its checkpoints folder, one checkpoint, or a directory of Hugging Face's
// transformers or PEFT, or a model in its cache by name.
CheckpointSource open_source(const std::string& where);

struct SourceModel {
  models::AnyConfig config;
  int64_t max_positions = 0;  // 0: unknown
  models::SpecialTokens tokens;
  std::string generation = "";  // text of generation_config.json; empty: none
};
// The model in it. Throws an Error if that isn't known, or if Hugging Face has no such model.
SourceModel model_of(const CheckpointSource& from);

// Throws an Error unless the tensors are those that the config needs; a tied head may be absent.
void check_model(const CheckpointSource& from, const models::AnyConfig& config);

// The folder of its tokenizer.json; empty: none known.
std::filesystem::path tokenizer_folder(const CheckpointSource& from);

// The run's copy of the configs of the Hugging Face directory it started from; empty: none.
std::filesystem::path origin_folder(const CheckpointSource& from);

// "bf16", "fp32" or "fp16"; nullopt for "keep".
std::optional<at::ScalarType> parse_dtype(const std::string& name);

// The names below "model.", without that prefix. Throws an Error if there are none.
std::vector<std::string> model_names(const checkpoint::Source& source);

}  // namespace fsdp::cli
