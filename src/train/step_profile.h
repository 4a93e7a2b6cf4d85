// StepProfile: fsdp train --profile N. After a few warm-up steps, profiles N steps unit by unit and
// traces one more. All ranks do; rank 0 shows its tables and writes a trace of all ranks,
// profile.json and a page.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <string>

#include "fsdp/profile.h"
#include "observe/step_time.h"
#include "observe/step_watch.h"
#include "observe/trace.h"
#include "train/training.h"

namespace fsdp::train {

class StepProfile {
 public:
  // Profiles train.profile steps; 0: does nothing. `graphed`: the other steps are replayed as CUDA
  // graphs.
  explicit StepProfile(const Training& training, bool graphed = false);

  // The next step must be eager: it warms up, is profiled or is traced.
  bool active() const { return taken_ < wanted(); }

  // Called around each step, on every rank. after_step() returns the report once, otherwise "".
  // Collective.
  void before_step(int64_t step);
  std::string after_step();
  // The report so far, if the run ends before the profile is complete; otherwise "".
  std::string finish();

 private:
  static constexpr int64_t kWarmup = 3;
  int64_t wanted() const { return steps_ > 0 ? kWarmup + steps_ + 1 : 0; }
  bool traces_now() const { return taken_ == wanted() - 1; }
  observe::StepSettings settings() const;
  void begin_trace();
  observe::StepTime end_trace();
  void merge(const observe::StepTime& time) const;
  std::string text(const observe::StepTime* traced) const;

  const Training& training_;
  bool graphed_;
  int64_t steps_;
  int64_t taken_ = 0;
  int64_t step_ = 0;      // that is being taken
  int64_t measured_ = 0;  // bytes, peak of a GPU
  int64_t met_ = 0;       // ns, when ranks left the barrier before the traced step
  Profile profile_;
  observe::Trace trace_;
  std::optional<observe::StepWatch> watch_;
  std::optional<at::RecordFunction> scope_;  // "step N"
};

}  // namespace fsdp::train
