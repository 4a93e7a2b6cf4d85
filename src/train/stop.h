// StopSignals: SIGTERM, SIGINT and SIGUSR1 as a request that the loop sees at the end of a step,
// with a deadline. SIGUSR1 is what batch systems send ahead of a job's time limit.
//
// After the first signal the run may finish the part it is in (a step, an evaluation) and save. If
// that takes longer than the grace, a watchdog thread reports where this rank is and ends the
// process with 128 + signal. Under `fsdp run`, and with ranks that `fsdp train` started, the
// launcher does this for all ranks; it reads the grace from the rank's status (base/rank_status.h).
// The watchdog also ends a run that has failed and doesn't get through its destructors.
// A second signal ends the process at once. SIGUSR1 doesn't count: it may be repeated, and a
// SIGTERM after it is the first one.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <string>
#include <thread>

namespace fsdp::train {

class StopSignals {
 public:
  // Takes over the signals; only one object may exist. `grace_s` (train.grace): seconds from the
  // signal to the kill. 0: each part that follows the signal gets rank_status::default_grace() of
  // its expected duration. `rank` is for the report; -1: not a rank.
  explicit StopSignals(double grace_s = 0, int rank = -1);
  ~StopSignals();  // restores the handlers
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  static int received();  // the signal that counts; 0: none yet

  // The run has failed, and the error is printed: what follows, destructors above all, may take
  // `limit`. Then the process ends with `code`.
  void failed(int code, std::chrono::milliseconds limit);

  // Reports that the run begins a part ("step", "save") that a signal doesn't interrupt. The
  // expected duration is the longest of `expected_s` and recent parts and steps. `part` is a
  // literal.
  void begin_part(const char* part, double expected_s = 0);
  double slowest(const std::string& part) const;  // seconds, of recent ones; 0: none yet

 private:
  void watch();
  [[noreturn]] void give_up(const std::string& since, int code, double waited_s,
                            double cpu_before_s) const;

  const double grace_s_;
  const int rank_;
  std::string part_;
  std::chrono::steady_clock::time_point part_begun_;
  std::map<std::string, std::deque<double>> recent_;  // seconds of the last parts, by name
  std::atomic<bool> closing_{false};
  std::atomic<int> failed_{0};                                 // the code
  std::chrono::steady_clock::time_point failed_at_, fail_by_;  // valid once `failed_` is set
  std::thread watchdog_;
};

}  // namespace fsdp::train
