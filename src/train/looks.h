// What a run looks at between its steps: the loss on other data, a text it writes, what
// deterministic operators cost.
#pragma once

#include "train/report.h"
#include "train/stop.h"
#include "train/training.h"

namespace fsdp::train {

// All are collective, and report what they find.
void evaluate_now(Report& report, const Training& training, const RunState& state,
                  StopSignals& signals);
void sample_now(Report& report, const Training& training, const RunState& state,
                StopSignals& signals);
// A few forward and backward passes of one micro-batch with and without deterministic operators,
// from the same random state. Updates nothing.
void show_cost_of_determinism(Report& report, Training& training, const Samples& batch);

}  // namespace fsdp::train
