/// @file
/// Loss scaling for float16: keeps small gradients from underflowing.
///
///     fsdp::GradScaler scaler;
///     scaler.scale(loss).backward();
///     scaler.unscale_(sharded);         // only needed before clipping
///     sharded.clip_grad_norm_(1.0);
///     scaler.step(optimizer);
///     scaler.update();
///     optimizer.zero_grad();
///
/// The scale grows while gradients stay finite. If any rank's gradients overflow, all ranks skip
/// the step and the scale shrinks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

namespace fsdp {

class Optimizer;
class Sharded;
namespace shard {
class Model;
}

/// Options of GradScaler.
struct GradScalerOptions {
  double init_scale = 65536.0;     ///< The first scale.
  double growth_factor = 2.0;      ///< Multiplies the scale when it grows.
  double backoff_factor = 0.5;     ///< Multiplies the scale after an overflow.
  int64_t growth_interval = 2000;  ///< Steps without overflow before the scale grows.
  bool enabled = true;             ///< False: every call passes through.
};

/// Scales the loss, unscales the gradients and skips steps that overflowed.
class GradScaler {
 public:
  /// Throws Error for a setting that makes no sense.
  explicit GradScaler(GradScalerOptions options = {});

  /// The loss times the scale; call backward on it.
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients by the scale and counts infinities and NaNs. At most once between
  /// updates. Collective.
  void unscale_(const Sharded& sharded);
  /// The same for the optimizer's model. Collective.
  void unscale_(const Optimizer& optimizer);

  /// Steps if every gradient on every rank is finite, and returns whether it did. Unscales first if
  /// that wasn't done. Collective. Waits for the device.
  bool step(Optimizer& optimizer);
  /// The same for an update of your own, such as torch::optim's on Sharded::parameters().
  /// Collective. Waits for the device.
  bool step(const Sharded& sharded, const std::function<void()>& update);

  /// Adjusts the scale after the steps of an iteration. Waits for the device.
  void update();

  /// The current scale.
  double scale() const { return state_.scale; }
  /// Whether it does anything.
  bool enabled() const { return options_.enabled; }

  /// What a checkpoint must store.
  struct State {
    double scale;        ///< The current scale.
    int64_t good_steps;  ///< Steps since the scale last changed.
  };
  /// The current state.
  State state() const { return state_; }
  /// Restores a state.
  void load_state(State state);

 private:
  void unscale(const std::shared_ptr<shard::Model>& model);
  bool overflowed(const std::shared_ptr<shard::Model>& model);
  bool step(const std::shared_ptr<shard::Model>& model, const std::function<void()>& update);

  struct Checked {
    at::Tensor not_finite;  // count over all ranks, on the device
    bool stepped = false;
  };

  GradScalerOptions options_;
  State state_;
  std::map<std::shared_ptr<shard::Model>, Checked> checked_;  // since the last update
};

}  // namespace fsdp
