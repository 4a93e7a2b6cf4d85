/// @file
/// Learning-rate schedules, and the scheduler that applies one to an optimizer.
///
///     fsdp::LRScheduler scheduler(
///         optimizer,
///         fsdp::LRSchedule::cosine({.total_steps = 10'000, .warmup_steps = 200,
///                                   .final_ratio = 0.1}));
///     optimizer.step();
///     scheduler.step();   // after every step of the optimizer
///
/// A schedule is a factor on the learning rate as a function of the step. Steps count from 0. In
/// warm-up, step s has the factor (s + 1) / warmup_steps: the first step already moves, and the
/// last one has the full rate. From total_steps on the factor is final_ratio.
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp {

class Optimizer;

/// Options of LRSchedule.
struct ScheduleOptions {
  int64_t total_steps = 0;   ///< Length of the training. Not for constant().
  int64_t warmup_steps = 0;  ///< Steps of warm-up, part of total_steps.
  int64_t decay_steps = 0;   ///< Steps of decay at the end, part of total_steps. Only for wsd().
  double final_ratio = 0.0;  ///< The last factor. Not for constant().
};

/// How the factor falls from 1 to final_ratio, at progress x in [0, 1].
enum class Decay {
  NONE,    ///< It stays 1.
  LINEAR,  ///< 1 - x.
  COSINE,  ///< (1 + cos(pi x)) / 2.
  SQRT,    ///< 1 - sqrt(x): fast at first, slow at the end.
};

/// The factor on the learning rate as a function of the step. Stateless. Bad options are an Error
/// that names the field.
class LRSchedule {
 public:
  /// 1 after the warm-up.
  static LRSchedule constant(ScheduleOptions options = {});
  /// Linear decay after the warm-up.
  static LRSchedule linear(ScheduleOptions options);
  /// Cosine decay after the warm-up.
  static LRSchedule cosine(ScheduleOptions options);
  /// Warm-up, stable, decay: the full rate until decay_steps before the end.
  static LRSchedule wsd(ScheduleOptions options, Decay decay = Decay::LINEAR);

  /// The factor at a step.
  double at(int64_t step) const;
  /// The factor at a step.
  double operator()(int64_t step) const { return at(step); }

 private:
  LRSchedule(const ScheduleOptions& options, int64_t decay_from, Decay decay);

  int64_t warmup_;
  int64_t decay_from_, decay_to_;
  double final_ratio_;
  Decay decay_;
};

/// Sets every group's learning rate to its rate at construction times the factor. The optimizer
/// must outlive it.
class LRScheduler {
 public:
  /// Sets the rates of step 0.
  LRScheduler(Optimizer& optimizer, LRSchedule schedule);

  /// Goes to the next step.
  void step() { set_steps(steps_ + 1); }
  /// The current step.
  int64_t steps() const { return steps_; }
  /// Goes to a step, to resume a run.
  void set_steps(int64_t steps);

 private:
  Optimizer& optimizer_;
  LRSchedule schedule_;
  std::vector<double> full_rates_;  // by group
  int64_t steps_ = 0;
};

}  // namespace fsdp
