// What a step should need of a device's memory, by kind, beside what its allocator measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "fsdp/shard_info.h"

namespace fsdp::observe {

// Of the measured peak, what nobody accounts for: (measured - known) / measured. Negative: more is
// known of than was ever allocated at once.
double unaccounted_share(const MemoryReport& memory, int64_t measured);

// A few lines. `memory` is Profile::memory(); `measured` the allocator's peak in bytes, nothing on
// the CPU, where nobody counts.
std::string describe(const MemoryReport& memory, std::optional<int64_t> measured);

}  // namespace fsdp::observe
