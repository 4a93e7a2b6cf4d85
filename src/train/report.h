// Report: the output of a run. Rank 0's goes to the screen, to metrics.jsonl, to events.jsonl and
// to TensorBoard. The other ranks only measure time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "fsdp/train_step.h"
#include "observe/advice.h"
#include "observe/metrics.h"
#include "observe/summary.h"
#include "train/evaluate.h"
#include "train/training.h"

namespace fsdp::train {

// The time of a step. For a replayed step, `seconds` is known with its outcome.
struct StepCost {
  double seconds = 0;
  double data_s = 0;             // of these, waiting for data
  std::optional<double> comm_s;  // of these, exposed communication; unknown for a replayed step
  std::optional<double> wait_s;  // waiting for other ranks, on any thread; likewise
  double lr = 0;
};

class Report {
 public:
  Report(const Training& training, const RunState& start);
  ~Report();

  // Runs a part of the run and records its time. Returns seconds.
  enum Part { kStep, kCheckpoint, kEvaluation };
  double timed(Part part, const std::function<void()>& work);

  // Of the step that timed() ran last; `waited` is its time spent waiting for data.
  StepCost cost(std::chrono::nanoseconds waited, bool replayed) const;
  void step(const RunState& state, const StepOutcome& outcome, const StepCost& cost);
  void evaluation(const RunState& state, const Evaluation& evaluation);
  // After the last step, finish() shows it.
  void sample(const RunState& state, const std::string& text);
  void line(const std::string& text);  // one or more lines of text
  // A line of events.jsonl (observe/event_log.h), of the last step.
  void event(const std::string& kind, const nlohmann::ordered_json& facts);
  // Records the figures of every rank, the first time and then ever more rarely; `now`: in any
  // case. Collective.
  void compare_ranks(bool now = false);
  // Every log.compare_ranks steps: compares the ranks' times since the last time. Collective; every
  // rank calls it after each of its steps.
  void compare_window(int64_t step);
  void settle();  // writes the last step's record to the files
  // Shows the loss curve, the summary and the last sample. Collective.
  void finish(bool stopped);

 private:
  struct Screen;  // rank 0 only
  // Throws if the run's directory isn't this run's anymore.
  void check_owner() const;
  void write(const observe::StepRecord& record);
  void add_experts(observe::StepRecord& record, const ExpertFigures& figures);
  void advise(const observe::StepRecord& record);
  void warn(const observe::Advice& advice);
  nlohmann::ordered_json start_facts() const;

  const Training& training_;
  std::unique_ptr<Screen> screen_;
  std::chrono::steady_clock::time_point begin_;
  double last_step_s_ = 0, exposed_before_s_ = 0, last_wait_s_ = 0;
  double waited_s_ = 0;        // of all steps
  int64_t first_retries_ = 0;  // of the allocator, in the first steps
  int64_t step_ = 0;           // the last one
  int64_t compared_ = 0;       // calls of compare_ranks()
  struct Window {              // sums since the last comparison
    double steps = 0, step_s = 0, data_s = 0, comm_s = 0, wait_s = 0;
  } window_;
  observe::RunSummary summary_;
};

}  // namespace fsdp::train
