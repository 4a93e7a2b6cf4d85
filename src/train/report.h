// Report: what a run tells while it goes on. Rank 0's goes to the screen, to metrics.jsonl and to
// TensorBoard; that of the other ranks keeps time and says nothing.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "observe/metrics.h"
#include "observe/summary.h"
#include "train/step.h"
#include "train/training.h"

namespace fsdp::train {

// What a step took. Of a step that is replayed, `seconds` is known with its outcome.
struct StepCost {
  double seconds = 0;
  double data_s = 0;             // of them, waiting for data
  std::optional<double> comm_s;  // and for communication; not known of a step that is replayed
  double lr = 0;
};

class Report {
 public:
  Report(const Training& training, const RunState& start);
  ~Report();

  // Runs a part of the run and keeps its time, in seconds.
  enum Part { kStep, kCheckpoint, kEvaluation };
  double timed(Part part, const std::function<void()>& work);

  // Of the step that `timed` ran last; `waited` is for data, in it.
  StepCost cost(std::chrono::nanoseconds waited, bool replayed) const;
  void step(const RunState& state, const StepOutcome& outcome, const StepCost& cost);
  void evaluation(const RunState& state, const Evaluation& evaluation);
  void sample(const RunState& state, const std::string& text);
  void line(const std::string& text);  // a line of its own
  void settle();                       // the last step's line goes to the files, as it is
  void finish();                       // the summary

 private:
  struct Screen;  // rank 0 only
  void write(const observe::StepRecord& record);
  void advise(const observe::StepRecord& record);

  const Training& training_;
  std::unique_ptr<Screen> screen_;
  std::chrono::steady_clock::time_point begin_;
  double last_step_s_ = 0, exposed_before_s_ = 0;
  observe::RunSummary summary_;
};

}  // namespace fsdp::train
