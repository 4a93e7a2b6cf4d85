#include "train/step_profile.h"

#include <algorithm>

#include "base/format.h"
#include "observe/memory_check.h"
#include "train/device.h"

namespace fsdp::train {

StepProfile::StepProfile(const Training& training, bool graphed)
    : training_(training), graphed_(graphed), steps_(training.config.train.profile) {}

void StepProfile::before_step() {
  if (!active() || taken_ < kWarmup) return;
  if (traces_now()) return trace_.start();
  reset_peak_memory(training_.world.device());
  profile_.begin(training_.sharded);
}

std::string StepProfile::after_step() {
  if (!active()) return "";
  bool traced = traces_now();
  bool profiled = !traced && taken_ >= kWarmup;
  if (profiled) {
    profile_.end();
    measured_ = std::max(measured_, peak_memory(training_.world.device()));
  }
  std::string path;
  if (traced) {
    path = training_.directory.trace(training_.world.rank()).string();
    trace_.save(path);
  }
  ++taken_;
  return traced ? text(path) : "";
}

std::string StepProfile::finish() {
  if (!active()) return "";
  taken_ = wanted();
  if (profile_.steps() == 0)
    return formatted("nothing was profiled: the run ended within the {} warm-up steps", kWarmup);
  return text("");
}

std::string StepProfile::text(const std::string& trace) const {
  std::string out = profile_.describe();
  if (graphed_)
    out += "these steps were eager; the others are replayed as CUDA graphs and take less time\n";
  std::optional<int64_t> measured;
  if (!training_.world.device().is_cpu()) measured = measured_;
  out += "\n" + observe::describe(profile_.memory(), measured);
  if (profile_.steps() < steps_)
    out += formatted("the run ended after {} of the {} steps to profile{}", profile_.steps(),
                     steps_, trace.empty() ? ", without a trace" : "");
  else if (trace.empty())
    out += "the run ended before a step was traced";
  else
    out += formatted("trace of one step, for https://ui.perfetto.dev: {}{}", trace,
                     training_.world.size() > 1 ? " (and one per other rank)" : "");
  return out;
}

}  // namespace fsdp::train
