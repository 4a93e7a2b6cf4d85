// Learning-rate schedules: the factor on the learning rate as a function of the step, and the
// scheduler that applies it to an optimizer.
//
//   fsdp::LRScheduler scheduler(
//       optimizer,
//       fsdp::LRSchedule::cosine({.total_steps = 10'000, .warmup_steps = 200, .final_ratio =
//       0.1}));
//   optimizer.step();
//   scheduler.step();   // after every step of the optimizer
//
// Steps count from 0. During warm-up step s has the factor (s + 1) / warmup_steps: the first step
// moves already, the last of the warm-up has the full rate. At total_steps and after it the factor
// is final_ratio.
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp {

class Optimizer;

struct ScheduleOptions {
  int64_t total_steps = 0;   // of the training; constant() needs none
  int64_t warmup_steps = 0;  // of total_steps
  int64_t decay_steps = 0;   // of total_steps, the last ones; wsd() only
  double final_ratio = 0.0;  // of the full rate, at the end; constant() has none
};

// How the rate falls from 1 to final_ratio, at progress x in [0, 1].
enum class Decay {
  NONE,
  LINEAR,  // 1 - x
  COSINE,  // (1 + cos(pi x)) / 2
  SQRT,    // 1 - sqrt(x): falls fast and levels out late
};

// The factor as a function of the step; without state. Bad options are an Error that names the
// field.
class LRSchedule {
 public:
  static LRSchedule constant(ScheduleOptions options = {});  // 1 after the warm-up, for ever
  static LRSchedule linear(ScheduleOptions options);         // falls from the end of the warm-up on
  static LRSchedule cosine(ScheduleOptions options);         // likewise
  // Warm-up, stable, decay: the full rate until decay_steps before the end.
  static LRSchedule wsd(ScheduleOptions options, Decay decay = Decay::LINEAR);

  double at(int64_t step) const;
  double operator()(int64_t step) const { return at(step); }

 private:
  LRSchedule(const ScheduleOptions& options, int64_t decay_from, Decay decay);

  int64_t warmup_;
  int64_t decay_from_, decay_to_;
  double final_ratio_;
  Decay decay_;
};

// Applies a schedule: every group's learning rate is what it was when the scheduler was made, times
// the factor. The optimizer must outlive it.
class LRScheduler {
 public:
  LRScheduler(Optimizer& optimizer, LRSchedule schedule);

  void step() { set_steps(steps_ + 1); }
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps);  // when a training is resumed

 private:
  Optimizer& optimizer_;
  LRSchedule schedule_;
  std::vector<double> full_rates_;  // by group
  int64_t steps_ = 0;
};

}  // namespace fsdp
