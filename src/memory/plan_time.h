// How long a step takes, by a simple model: products at a share of the peak, everything else by the
// bytes it moves, communication by the speed of its links.
#pragma once

#include "memory/plan_run.h"

namespace fsdp::memory {

// `kinds`: before anything was offloaded.
PlannedTime time_of(const DryRun& run, const PlannedMemory& kinds, const PlanOptions& options);

// Works out time.exposed: what of the communication the computation does not cover.
void hide_communication(PlannedTime& time, int64_t units);

}  // namespace fsdp::memory
