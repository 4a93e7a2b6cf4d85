// The recipe of --init-from: what a run that begins with weights does where neither a flag nor the
// user's config says otherwise.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "train/config.h"

namespace fsdp::train {

// The name of the ready config with the fixed part.
inline constexpr const char* kRecipe = "finetune";

// Sets every option of the recipe that isn't among `said` (options that a flag or the user's config
// set): the learning rate by kind, the length of a sample by the data and `limit`, the tokens that
// the model takes (0: unknown), and what configs/finetune.toml has. Returns lines that say so;
// empty if everything was said.
std::string take_recipe(Config& config, const std::set<std::string>& said, int64_t limit);

// For a run that resumes: what the recipe would set is as in `kept`.
void keep_recipe(Config& config, const std::set<std::string>& said, const Config& kept);

// Tokens per sample: the least power of two that holds the longest line of the data, as far as its
// bytes tell, and not so many that small data would be a few samples.
struct Fitting {
  int64_t seq;
  std::string why;
};
Fitting fitting_seq(const data::DataConfig& data, int64_t limit);

}  // namespace fsdp::train
