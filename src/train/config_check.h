// What no single value can show: choices that contradict each other, or the number of ranks. Each
// is an Error that names the keys and ends in what to do.
#pragma once

#include <cstdint>
#include <optional>

#include "train/config.h"

namespace fsdp::train {

void check(const Config& config, int world);
void check_precision(const ShardConfig& shard);       // of gradients beside that of what makes them
void check_choices(const Config& config, int world);  // those that have nothing to do with data

// Steps of the run where the config alone says it (steps, tokens); not with epochs.
std::optional<int64_t> known_steps(const Config& config);

bool offloads(const Config& config);  // whether anything lies in host memory

}  // namespace fsdp::train
