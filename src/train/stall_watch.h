// StallWatch: reports a step that takes far longer than this rank's steps do, with the stacks of
// its threads. It works while the main thread is stuck in a driver or a lock.
//
// A step lasts from one begin_step() to the next. The host is at most a step ahead of a GPU, so a
// step that hangs on the device is found as well. A rank that waits for others in a collective
// isn't reported: it isn't the one that stalls, and the collective has a timeout of its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "train/run_directory.h"

namespace fsdp::train {

// How long a step may take, by those before it.
class StepHistory {
 public:
  // `factor` times as long as nine of ten recent steps, and `least_s` at least. 0: no limit ever.
  StepHistory(double factor, double least_s) : factor_(factor), least_s_(least_s) {}

  void add(double seconds);
  double usual_s() const;                 // what nine of ten recent steps took
  std::optional<double> limit_s() const;  // nullopt: there are too few of them

 private:
  const double factor_, least_s_;
  std::deque<double> recent_;
};

struct Stall {
  int64_t step = 0;
  double seconds = 0;  // so far
  double usual_s = 0;  // see StepHistory
};

class StallWatch {
 public:
  // `report` is called once per stall, on the watch's thread.
  StallWatch(StepHistory history, std::function<void(const Stall&)> report);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  void begin_step(int64_t step);
  void pause();  // what comes now isn't a step

 private:
  using Clock = std::chrono::steady_clock;
  void watch();

  const std::function<void(const Stall&)> report_;
  Mutex mutex_;
  Condition changed_;
  StepHistory history_ FSDP_GUARDED_BY(mutex_);
  int64_t step_ FSDP_GUARDED_BY(mutex_) = 0;  // under way; 0: none
  Clock::time_point begun_ FSDP_GUARDED_BY(mutex_);
  uint64_t changes_ FSDP_GUARDED_BY(mutex_) = 0;
  bool closing_ FSDP_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// The report: the first lines, for the screen, and all of it.
struct StallReport {
  std::string brief, full;
};
StallReport describe(const Stall& stall);

// Prints the brief one, and appends the full one to the rank's file in the run's directory.
void report(const Stall& stall, const RunDirectory& run, int rank);

}  // namespace fsdp::train
