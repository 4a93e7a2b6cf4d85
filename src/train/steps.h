// Steps: the steps of a run, eager or as CUDA graphs.
//
// An eager step's outcome is known when it returns. With graphs the host runs ahead: it gives the
// device a step while the one before is computed, and only then reads what came out of that.
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
  // `wants_to_stop`: did this rank get a signal?
  Steps(const Training& training, const StepOptions& options, bool graphed,
        std::function<bool()> wants_to_stop);
  ~Steps();

  // Takes a step, or begins it. Collective. `eager`: this one not as a graph in any case.
  void take(const Samples& batch, bool eager);
  // Of the oldest step that was not asked for; nothing where none is known to be done. In the order
  // of the steps.
  std::optional<StepOutcome> outcome();
  void finish();  // waits for what was begun, so that every outcome is known

  bool host_is_ahead() const;  // the last step is computed without the host waiting for it

 private:
  struct Graphed;
  void take_graphed(const Samples& batch);
  void collect(size_t but);  // outcomes of all steps that were begun but the last few

  const Training& training_;
  StepOptions options_;
  bool graphed_, ahead_ = false;
  std::function<bool()> wants_to_stop_;
  std::unique_ptr<Graphed> steps_;
  std::deque<StepOutcome> known_;
};

// Whether steps are to be graphs, as train.graph says. An Error where it is "on" and they cannot.
// `steps`: that are left of the run.
bool wants_graphs(const Training& training, int64_t steps);

}  // namespace fsdp::train
