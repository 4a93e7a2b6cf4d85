// A step's device memory by kind, planned and measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "fsdp/plan.h"
#include "fsdp/shard_info.h"

namespace fsdp::observe {

// The unaccounted share of the measured peak: (measured - known) / measured. Negative if the known
// memory is more than was ever allocated at once.
double unaccounted_share(const MemoryReport& memory, int64_t measured);

// A table. `memory`: Profile::memory(). `measured`: the allocator's peak in bytes; nullopt on the
// CPU, where no allocator counts.
std::string describe(const MemoryReport& memory, std::optional<int64_t> measured);

// A plan beside what the engine holds after a step, and the allocator's peak if there is one.
struct Compared {
  std::string text;  // a table
  // (measured - planned) / planned, of the peak; without one, of parameters and states.
  double off = 0;
};
Compared compare(const PlannedMemory& planned, const MemoryReport& held,
                 std::optional<int64_t> peak);

}  // namespace fsdp::observe
