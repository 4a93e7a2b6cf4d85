// StepProfile: fsdp train --profile N. Takes the time of N steps apart, unit by unit, after a few
// steps that warm up, and writes a trace of one more. Every rank does; rank 0's table is shown.
#pragma once

#include <cstdint>
#include <string>

#include "fsdp/profile.h"
#include "observe/trace.h"
#include "train/training.h"

namespace fsdp::train {

class StepProfile {
 public:
  // train.profile says how many; with 0 nothing here does anything. `graphed`: steps that are not
  // profiled are replayed as CUDA graphs.
  explicit StepProfile(const Training& training, bool graphed = false);

  // The next step must be an eager one: it warms up, is profiled, or traced.
  bool active() const { return taken_ < wanted(); }

  // Around each step, on every rank. after_step returns what there is to show, once; else "".
  void before_step();
  std::string after_step();
  // Where the run ends before all was seen, what there is.
  std::string finish();

 private:
  static constexpr int64_t kWarmup = 3;
  int64_t wanted() const { return steps_ > 0 ? kWarmup + steps_ + 1 : 0; }
  bool traces_now() const { return taken_ == wanted() - 1; }
  std::string text(const std::string& trace) const;

  const Training& training_;
  bool graphed_;
  int64_t steps_;
  int64_t taken_ = 0;
  int64_t measured_ = 0;  // bytes; on a GPU
  Profile profile_;
  observe::Trace trace_;
};

}  // namespace fsdp::train
