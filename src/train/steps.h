// Steps: the steps of a run, by fsdp::TrainStep.
//
// The outcome of an eager step is known when it returns. With graphs the host runs ahead: it
// launches a step while the device computes the one before, and then reads the outcome of that.
#pragma once

#include <functional>
#include <optional>

#include "fsdp/train_step.h"
#include "train/training.h"

namespace fsdp::train {

class Steps {
 public:
  // `wants_to_stop`: whether this rank got a signal.
  Steps(const Training& training, bool graphed, std::function<bool()> wants_to_stop);

  // Takes or launches a step. Collective. `eager`: don't use a graph for this one.
  void take(const Samples& batch, bool eager);
  // The oldest unread outcome, or nullopt. In the order of the steps.
  std::optional<StepOutcome> outcome() { return step_.outcome(); }
  void finish() { step_.wait(); }  // all launched steps end, and their outcomes are known
  bool host_is_ahead() const { return ahead_; }  // it didn't wait for the last step

 private:
  const Training& training_;
  const bool graphed_;
  bool ahead_ = false;
  TrainStep step_;
};

// Whether to use graphs, by train.graph. Throws Error if it is "on" and that isn't possible.
// `steps`: remaining in the run.
bool wants_graphs(const Training& training, int64_t steps);

}  // namespace fsdp::train
