// Steps: the steps of a run, eager or as CUDA graphs.
//
// The outcome of an eager step is known when it returns. With graphs the host runs ahead: it launches
// a step while the device computes the one before, and then reads the outcome of that.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "train/step.h"
#include "train/training.h"

namespace fsdp::train {

class Steps {
 public:
  // `wants_to_stop`: whether this rank got a signal.
  Steps(const Training& training, const StepOptions& options, bool graphed,
        std::function<bool()> wants_to_stop);
  ~Steps();

  // Takes or launches a step. Collective. `eager`: don't use a graph for this one.
  void take(const Samples& batch, bool eager);
  // The oldest unread outcome, or nullopt. In the order of the steps.
  std::optional<StepOutcome> outcome();
  void finish();  // waits for all launched steps, so that every outcome is known

  bool host_is_ahead() const;  // the host didn't wait for the last step

 private:
  struct Graphed;
  void take_graphed(const Samples& batch);
  void collect(size_t but);  // reads the outcomes of all launched steps but the last `but`

  const Training& training_;
  StepOptions options_;
  bool graphed_, ahead_ = false;
  std::function<bool()> wants_to_stop_;
  std::unique_ptr<Graphed> steps_;
  std::deque<StepOutcome> known_;
};

// Whether to use graphs, by train.graph. Throws Error if it is "on" and that isn't possible. `steps`:
// remaining in the run.
bool wants_graphs(const Training& training, int64_t steps);

}  // namespace fsdp::train
