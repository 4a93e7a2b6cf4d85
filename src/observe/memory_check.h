// What a step should need of a device's memory, by kind, beside what its allocator measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "fsdp/plan.h"
#include "fsdp/shard_info.h"

namespace fsdp::observe {

// Of the measured peak, what nobody accounts for: (measured - known) / measured. Negative: more is
// known of than was ever allocated at once.
double unaccounted_share(const MemoryReport& memory, int64_t measured);

// A few lines. `memory` is Profile::memory(); `measured` the allocator's peak in bytes, nothing on
// the CPU, where nobody counts.
std::string describe(const MemoryReport& memory, std::optional<int64_t> measured);

// A plan beside what the engine holds after a step, and the allocator's peak where somebody counts.
struct Compared {
  std::string text;  // a table
  double off = 0;    // of the peak, else of parameters and states: (measured - planned) / planned
};
Compared compare(const PlannedMemory& planned, const MemoryReport& held,
                 std::optional<int64_t> peak);

}  // namespace fsdp::observe
