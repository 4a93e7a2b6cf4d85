// Checks of combinations: options that contradict each other or the number of ranks. Each violation
// is an Error that names the options and says what to do.
#pragma once

#include <cstdint>
#include <optional>

#include "train/config.h"

namespace fsdp::train {

void check(const Config& config, int world);
void check_precision(const ShardConfig& shard);       // of gradients, against that of parameters
void check_choices(const Config& config, int world);  // without the checks of data and length

// Steps of the run, if the config alone determines them (steps or tokens, not epochs).
std::optional<int64_t> known_steps(const Config& config);

bool offloads(const Config& config);  // whether anything is kept in host memory

}  // namespace fsdp::train
