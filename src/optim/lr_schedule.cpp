// Learning-rate schedules: the factor of a step, and the scheduler that sets it on an optimizer.
#include "fsdp/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/format.h"
#include "fsdp/optim.h"
#include "optim/require.h"

namespace fsdp {
namespace {

using optim::require;

void check(const char* who, const ScheduleOptions& options) {
  require(options.total_steps > 0, who, "total_steps", options.total_steps, "above 0",
          "it is the number of steps of the whole training run.");
  require(options.warmup_steps >= 0, who, "warmup_steps", options.warmup_steps, "0 or more",
          "0 starts at the full rate.");
  require(options.decay_steps >= 0, who, "decay_steps", options.decay_steps, "0 or more",
          "0 keeps the full rate to the end.");
  require(options.warmup_steps <= options.total_steps, who, "warmup_steps", options.warmup_steps,
          "at most total_steps",
          formatted("total_steps is {}; a few percent of it is usual.", options.total_steps));
  require(
      options.decay_steps <= options.total_steps - options.warmup_steps, who, "decay_steps",
      options.decay_steps, "at most total_steps - warmup_steps",
      formatted("total_steps is {} and warmup_steps {}; 10 to 20 percent of total_steps is usual.",
                options.total_steps, options.warmup_steps));
  require(options.final_ratio >= 0 && options.final_ratio <= 1, who, "final_ratio",
          options.final_ratio, "between 0 and 1",
          "it is a fraction of the full rate, such as 0.1.");
}

void without_decay_steps(const char* who, const ScheduleOptions& options) {
  require(options.decay_steps == 0, who, "decay_steps", options.decay_steps, "omitted",
          "only wsd() has a stable phase before the decay.");
}

double remaining(Decay decay, double progress) {
  switch (decay) {
    case Decay::LINEAR:
      return 1 - progress;
    case Decay::COSINE:
      return (1 + std::cos(std::numbers::pi * progress)) / 2;
    case Decay::SQRT:
      return 1 - std::sqrt(progress);
    case Decay::NONE:
      break;
  }
  return 1;
}

}  // namespace

LRSchedule::LRSchedule(const ScheduleOptions& options, int64_t decay_from, Decay decay)
    : warmup_(options.warmup_steps),
      decay_from_(decay_from),
      decay_to_(options.total_steps),
      final_ratio_(options.final_ratio),
      decay_(decay) {}

double LRSchedule::at(int64_t step) const {
  require(step >= 0, "learning-rate schedule", "step", step, "0 or more", "steps count from 0.");
  if (step < warmup_) return static_cast<double>(step + 1) / static_cast<double>(warmup_);
  if (decay_ == Decay::NONE) return 1;
  if (step >= decay_to_) return final_ratio_;
  if (step <= decay_from_) return 1;
  const double progress =
      static_cast<double>(step - decay_from_) / static_cast<double>(decay_to_ - decay_from_);
  return final_ratio_ + (1 - final_ratio_) * remaining(decay_, progress);
}

LRSchedule LRSchedule::constant(ScheduleOptions options) {
  // The only schedule without an end.
  require(options.total_steps >= 0, "constant", "total_steps", options.total_steps, "0 or more",
          "omit it; a constant rate has no end.");
  if (options.total_steps == 0) options.total_steps = std::max<int64_t>(1, options.warmup_steps);
  check("constant", options);
  without_decay_steps("constant", options);
  return {options, options.total_steps, Decay::NONE};
}

LRSchedule LRSchedule::linear(ScheduleOptions options) {
  check("linear", options);
  without_decay_steps("linear", options);
  return {options, options.warmup_steps, Decay::LINEAR};
}

LRSchedule LRSchedule::cosine(ScheduleOptions options) {
  check("cosine", options);
  without_decay_steps("cosine", options);
  return {options, options.warmup_steps, Decay::COSINE};
}

LRSchedule LRSchedule::wsd(ScheduleOptions options, Decay decay) {
  check("wsd", options);
  if (options.decay_steps == 0) decay = Decay::NONE;
  return {options, options.total_steps - options.decay_steps, decay};
}

LRScheduler::LRScheduler(Optimizer& optimizer, LRSchedule schedule)
    : optimizer_(optimizer), schedule_(schedule) {
  for (const auto& group : optimizer_.groups()) full_rates_.push_back(group.lr);
  set_steps(0);
}

void LRScheduler::set_steps(int64_t steps) {
  const double factor = schedule_.at(steps);
  for (size_t i = 0; i < full_rates_.size(); ++i) optimizer_.set_lr(full_rates_[i] * factor, i);
  steps_ = steps;
}

}  // namespace fsdp
