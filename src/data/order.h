// The order of samples in an epoch: a permutation that is computed, not stored, from the seed and
// the epoch alone. Every process and platform gets the same, and any place in it without the
// others.
#pragma once

#include <cstdint>

namespace fsdp::data {

// Which of `n` samples comes at place `i` (0 <= i < n).
int64_t shuffled(int64_t i, int64_t n, uint64_t seed, int64_t epoch);

}  // namespace fsdp::data
