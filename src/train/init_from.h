// --init-from: what a run takes over from weights that are already there.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "train/config.h"

namespace fsdp::train {

struct Origin {
  std::filesystem::path weights;  // for checkpoint::load
  ModelConfig model;              // its shape; dropout and init_std are not said
  std::string tokenizer;          // "bytes" or a path; empty: none is known
};

// Looks at a Hugging Face directory, a run's directory, its checkpoints folder, or one checkpoint.
// No weights are read.
Origin find_origin(const std::string& where);

// Copies what a Hugging Face directory says beside its weights (how long texts may be, where they
// end, how to chat) to RUN/origin, for exports of the run. For one rank.
void keep_origin(const Origin& origin, const std::filesystem::path& into);

// Makes config.model the model of config.init_from, and data.tokenizer its tokenizer, unless that
// is among `given` (options that a file or a flag has set). An option of the model among `flags`
// that says something else is an Error; what a file says gives way, with a line in `notes` if it
// was a file of the user's choice.
//
// A run that is resumed has everything in its own directory, and goes on without the origin.
void take_origin(Config& config, const std::set<std::string>& given,
                 const std::set<std::string>& flags, bool chosen_file,
                 std::vector<std::string>& notes);

}  // namespace fsdp::train
