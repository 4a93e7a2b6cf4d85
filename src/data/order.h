// The order of samples in an epoch: a permutation that is computed, not stored, from the seed and
// the epoch alone. It is the same in every process and on every platform, and any element can be
// computed without the others.
#pragma once

#include <cstdint>

namespace fsdp::data {

// The sample at place `i` of an epoch of `n` samples (0 <= i < n).
int64_t shuffled(int64_t i, int64_t n, uint64_t seed, int64_t epoch);

// A hash: a bijection of 64 bits in which every output bit depends on every input bit.
uint64_t mixed(uint64_t value);

}  // namespace fsdp::data
