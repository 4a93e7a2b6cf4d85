/// @file
/// An optimizer of torch::optim on a sharded model, without the cost of Sharded::parameters().
///
///     auto optimizer = fsdp::optim::wrap<torch::optim::SGD>(sharded, torch::optim::SGDOptions(0.1));
///     loss.backward();
///     optimizer.step();
///     optimizer.zero_grad();
///     optimizer->param_groups()[0].options().set_lr(0.01);   // the optimizer itself
#pragma once

#include <functional>
#include <type_traits>
#include <utility>

#include "fsdp/fully_shard.h"

namespace torch::optim {
class LBFGS;
}

namespace fsdp::optim {

/// An elementwise optimizer whose step() is the only writer of a sharded model's parameters.
template <typename Optimizer>
class Wrapped {
  static_assert(!std::is_same_v<Optimizer, torch::optim::LBFGS>,
                "LBFGS needs whole gradients; each rank of a sharded model has a part of them");

 public:
  /// `arguments` follow the parameters in the optimizer's constructor.
  template <typename... Arguments>
  explicit Wrapped(Sharded sharded, Arguments&&... arguments)
      : sharded_(std::move(sharded)),
        optimizer_(sharded_.parameters_to_update(), std::forward<Arguments>(arguments)...) {}

  /// Updates every parameter that has a gradient. Collective.
  void step() {
    sharded_.update_parameters([this] { optimizer_.step(); });
  }
  /// Calls `closure` (forward and backward), updates, and returns what it returned. Collective.
  template <typename Closure>
  auto step(Closure&& closure) {
    auto loss = std::forward<Closure>(closure)();
    step();
    return loss;
  }
  /// Clears the gradients: Sharded::zero_grad().
  void zero_grad(bool set_to_none = true) { sharded_.zero_grad(set_to_none); }

  /// The optimizer, for its parameter groups and states. Call step() and zero_grad() above instead
  /// of its own.
  Optimizer& operator*() { return optimizer_; }
  /// The same.
  Optimizer* operator->() { return &optimizer_; }

 private:
  Sharded sharded_;
  Optimizer optimizer_;
};

/// Makes an optimizer of torch::optim that updates this rank's part of every trainable parameter.
/// Make it after the last fully_shard(). Elementwise optimizers only: one that looks at whole
/// tensors, for their norm or their rank, would see a part of them.
template <typename Optimizer, typename... Arguments>
Wrapped<Optimizer> wrap(const Sharded& sharded, Arguments&&... arguments) {
  return Wrapped<Optimizer>(sharded, std::forward<Arguments>(arguments)...);
}

}  // namespace fsdp::optim
