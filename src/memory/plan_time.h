// The duration of a step by a simple model: products at a share of the peak, everything else by the
// bytes it moves, communication by the speed of its links.
#pragma once

#include "memory/plan_run.h"

namespace fsdp::memory {

// `kinds`: memory without offload.
PlannedTime time_of(const DryRun& run, const PlannedMemory& kinds, const PlanOptions& options);

// Sets time.exposed: the communication that computation doesn't hide.
void hide_communication(PlannedTime& time, int64_t units);

}  // namespace fsdp::memory
