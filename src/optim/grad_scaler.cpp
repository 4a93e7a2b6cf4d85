// GradScaler: scales the loss, counts infinities over all ranks, skips steps that overflowed.
#include "fsdp/grad_scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <utility>

#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "kernels/update.h"
#include "optim/require.h"
#include "optim/states.h"
#include "shard/gradients.h"
#include "shard/model.h"
#include "shard/update.h"

namespace fsdp {

using optim::require;

GradScaler::GradScaler(GradScalerOptions options)
    : options_(options), state_{options.init_scale, 0} {
  require(std::isfinite(options.init_scale) && options.init_scale > 0, "GradScaler", "init_scale",
          options.init_scale, "above 0", "65536 is usual.");
  require(options.growth_factor >= 1, "GradScaler", "growth_factor", options.growth_factor,
          "1 or more", "2 is usual; powers of two cause no rounding.");
  require(options.backoff_factor > 0 && options.backoff_factor < 1, "GradScaler", "backoff_factor",
          options.backoff_factor, "between 0 and 1", "0.5 is usual.");
  require(options.growth_interval > 0, "GradScaler", "growth_interval", options.growth_interval,
          "above 0", "2000 is usual.");
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return options_.enabled ? loss * state_.scale : loss;
}

void GradScaler::unscale_(const Sharded& sharded) {
  unscale(shard::model_of(sharded));
}

void GradScaler::unscale_(const Optimizer& optimizer) {
  unscale(optim::states_of(optimizer).model());
}

void GradScaler::unscale(const std::shared_ptr<shard::Model>& model) {
  if (!options_.enabled) return;
  if (checked_.contains(model))
    throw Error("GradScaler: the gradients were already unscaled.",
                "call unscale_ once between two calls of update().");
  const auto engine = model->lock();
  at::NoGradGuard no_grad;
  at::Tensor not_finite;
  for (auto* flat : shard::trainable_flats(*engine)) {
    if (!flat->grad.defined()) continue;
    shard::change_gradient(*flat);
    auto count = kernels::count_not_finite(flat->grad).to(model->device());
    not_finite = not_finite.defined() ? not_finite.add_(count) : count;
    flat->grad.mul_(1 / state_.scale);
  }
  if (!not_finite.defined())
    throw Error("GradScaler: there are no gradients.", "call scale(loss).backward() first.");
  shard::sum_over_ranks(*engine, not_finite);
  checked_[model].not_finite = not_finite;
}

bool GradScaler::overflowed(const std::shared_ptr<shard::Model>& model) {
  return checked_.at(model).not_finite.item<double>() != 0;
}

bool GradScaler::step(Optimizer& optimizer) {
  return step(optim::states_of(optimizer).model(), [&] { optimizer.step(); });
}

bool GradScaler::step(const Sharded& sharded, const std::function<void()>& update) {
  return step(shard::model_of(sharded), update);
}

bool GradScaler::step(const std::shared_ptr<shard::Model>& model,
                      const std::function<void()>& update) {
  if (!options_.enabled) {
    update();
    return true;
  }
  if (!checked_.contains(model)) unscale(model);
  if (std::exchange(checked_.at(model).stepped, true))
    throw Error("GradScaler: step() was called twice.", "call update() after step().");
  // The engine drops a factor that clipping left for the skipped update together with the
  // gradients.
  if (overflowed(model)) return false;
  update();
  return true;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (checked_.empty())
    throw Error("GradScaler: update() without a step.", "call step(optimizer) before update().");
  bool overflow = false;
  for (const auto& [model, checked] : checked_) overflow |= overflowed(model);
  checked_.clear();
  if (overflow) {
    state_ = {state_.scale * options_.backoff_factor, 0};
  } else if (++state_.good_steps >= options_.growth_interval) {
    const double grown = state_.scale * options_.growth_factor;
    state_ = {std::isfinite(static_cast<float>(grown)) ? grown : state_.scale, 0};
  }
}

void GradScaler::load_state(State state) {
  require(std::isfinite(state.scale) && state.scale > 0, "GradScaler", "scale", state.scale,
          "above 0", "load what state() returned.");
  require(state.good_steps >= 0, "GradScaler", "good_steps", state.good_steps, "0 or more",
          "load what state() returned.");
  state_ = state;
}

}  // namespace fsdp
