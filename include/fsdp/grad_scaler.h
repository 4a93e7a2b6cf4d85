// GradScaler: keeps gradients of float16 out of the underflow. The loss is multiplied with a scale
// that grows while gradients stay finite; a step whose gradients overflowed on any rank is skipped
// by all, and the scale falls.
//
//   fsdp::GradScaler scaler;
//   scaler.scale(loss).backward();
//   scaler.unscale_(sharded);         // only needed before clipping
//   sharded.clip_grad_norm_(1.0);
//   scaler.step(optimizer);
//   scaler.update();
//   optimizer.zero_grad();
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

struct GradScalerOptions {
  double init_scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // steps without overflow before the scale grows
  bool enabled = true;             // false: every call passes through
};

class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  at::Tensor scale(const at::Tensor& loss) const;

  // Divides the gradients by the scale and looks for infinities and NaN. Once between updates.
  // Collective: one number is summed over the ranks; waits for no device.
  void unscale_(const Sharded& sharded);
  void unscale_(const Optimizer& optimizer);

  // Steps if every gradient of every rank is finite (unscaling first, if that was not done).
  // Returns whether it did. Collective; waits for the device.
  bool step(Optimizer& optimizer);
  // The same for an update that is not ours, torch::optim's on sharded.parameters() say.
  bool step(const Sharded& sharded, const std::function<void()>& update);

  // Moves the scale after the steps of an iteration.
  void update();

  double scale() const { return state_.scale; }
  bool enabled() const { return options_.enabled; }

  struct State {
    double scale;
    int64_t good_steps;  // since the scale last moved
  };
  State state() const { return state_; }
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
