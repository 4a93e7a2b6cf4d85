// --init-from: starting a run from existing weights.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "train/config.h"

namespace fsdp::train {

struct Origin {
  std::filesystem::path weights;  // for checkpoint::load
  models::ModelConfig model;      // its shape; dropout and init_std are unknown
  std::string tokenizer;          // "bytes" or a path; empty: unknown
  std::filesystem::path settings;  // the folder with its config.json; empty: none
  int64_t max_tokens = 0;          // the longest sequence that it takes; 0: unknown
};

// Inspects a Hugging Face directory, a run's directory, its checkpoints folder, or one checkpoint,
// of fsdp train or of PyTorch with a config.json beside it. Reads no weights.
Origin find_origin(const std::string& where);

// The weights of the model that a config's adapters are for. They may have gone since.
std::filesystem::path base_of_adapters(const Config& config);

// Copies the settings next to a Hugging Face model's weights (maximum length, end tokens, chat
// template) to `into`, for exports of the run. For one rank.
void keep_origin(const Origin& origin, const std::filesystem::path& into);

// Sets config.model to the model in config.init_from, and data.tokenizer to its tokenizer unless
// that is among `given` (options that the file or a flag set). A model option among `flags` with
// another value is an Error. A file's value is overridden, with a note if the user chose the file.
// Returns the longest sequence that the model takes; 0: unknown.
//
// A resumed run has everything in its own directory and doesn't need the origin.
int64_t take_origin(Config& config, const std::set<std::string>& given,
                    const std::set<std::string>& flags, bool chosen_file,
                    std::vector<std::string>& notes);

// Sets config.lora to what the directory in lora.init_from says. An option of it among `given` with
// another value is an Error; the dropout is the config's. Not for a resumed run.
void take_adapters(Config& config, const std::set<std::string>& given);

}  // namespace fsdp::train
