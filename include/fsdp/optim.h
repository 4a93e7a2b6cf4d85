/// @file
/// Optimizers for a sharded model: each rank updates its part of every parameter in one pass over
/// memory.
///
///     fsdp::AdamW optimizer(sharded, {.lr = 3e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1,
///                                     .groups = {fsdp::no_decay()}});
///     loss.backward();
///     sharded.clip_grad_norm_(1.0);   // step() applies the factor, without a pass of its own
///     optimizer.step();
///     optimizer.zero_grad();
///
/// Results equal torch::optim on the whole model, up to rounding, with one difference. A unit's
/// parameters of one dtype share a gradient buffer, so a parameter that its unit's backward didn't
/// reach has a zero gradient instead of none. A unit that no backward reached isn't updated, and
/// neither are frozen parameters (requires_grad false).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {

class Optimizer;
class Sharded;
namespace shard {
struct Engine;
class Flat;
struct HostFactor;
}  // namespace shard
namespace optim {
class States;
States& states_of(const Optimizer& optimizer);  ///< Internal.
}  // namespace optim

/// Parameters with a learning rate or weight decay of their own.
struct ParamGroup {
  /// Chooses by name, sizes or dtype. It must not read values, because they are sharded.
  using Where = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

  Where where = {};                         ///< The parameters of the group.
  bool norms = false;                       ///< Adds the parameters of normalization layers.
  std::optional<double> lr = {};            ///< Default: the optimizer's.
  std::optional<double> weight_decay = {};  ///< Default: the optimizer's.
};

/// Norms, biases and all other parameters of at most one dimension, without weight decay.
ParamGroup no_decay();

/// The base of all optimizers. Derive from it for an elementwise optimizer of your own, and from
/// MatrixOptimizer (muon.h) for one that needs whole matrices.
class Optimizer {
 public:
  /// A group in use. Group 0 holds what no ParamGroup chose; group 1 is the first ParamGroup.
  struct Group {
    double lr;                            ///< Current learning rate.
    double weight_decay;                  ///< Current weight decay.
    std::vector<std::string> parameters;  ///< Names in the module.
  };

  /// The states go with it; the model stays.
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates every parameter that has a gradient. Reshards gathered units first. Collective.
  void step();
  /// Updates units in host memory (ShardOptions::offload) during the next backward, each as soon as
  /// its gradients arrive; step() then does the rest.
  ///
  /// Call it before the last backward of a step that neither clips, scales nor reads gradients, and
  /// set the learning rate first. A backward that throws leaves some units updated. Has no effect
  /// without such units.
  virtual void step_in_backward();
  /// Clears the gradients: Sharded::zero_grad().
  void zero_grad(bool set_to_none = true);

  /// All groups. A parameter belongs to the first ParamGroup that chooses it.
  const std::vector<Group>& groups() const;
  /// A group's learning rate.
  double lr(size_t group = 0) const;
  /// Sets the learning rate of every group that has none of its own. Allowed at any time.
  void set_lr(double lr);
  /// Sets one group's learning rate.
  void set_lr(double lr, size_t group);
  /// Sets one group's weight decay.
  void set_weight_decay(double weight_decay, size_t group);

  /// Keeps learning rates, weight decays and update counts on the device, so that a CUDA graph of
  /// step() follows set_lr(), which writes the device's value in stream order.
  ///
  /// Results are the same. Don't change it during a capture. Turning it off waits for the device.
  ///
  /// A step whose clip factor isn't finite writes nothing. It isn't counted either, except on a GPU
  /// with a non-capturable optimizer, where the host doesn't know.
  void set_capturable(bool on);
  /// Whether it is capturable.
  bool capturable() const;

  /// Bytes of all states in memory.
  int64_t state_bytes() const;

  /// @name For optimizers of your own
  /// @{

  /// A stretch of a flat buffer whose parameters are in one group and had the same updates. All
  /// tensors but `grad` are views of that stretch.
  struct Piece {
    at::Tensor master;               ///< Undefined if `rest` is defined.
    at::Tensor low;                  ///< The shard to gather from; undefined if it is the master.
    at::Tensor rest;                 ///< Low half of a split master; `low` is the high half.
    std::vector<at::Tensor> states;  ///< In the order of the names given to the constructor.
    at::Tensor grad;                 ///< Of the whole flat buffer: a view would keep its memory.
    int64_t begin;                   ///< Where the stretch begins in the flat buffer.
    size_t group;                    ///< Its group.
    int64_t count;                   ///< Its index in Update::counts.
    int64_t step;                    ///< Number of this update, from 1. Unused if capturable.
  };

  /// One call of prepare().
  struct Update {
    std::vector<Piece> pieces;  ///< What to update.
    at::Tensor factor;          ///< Multiply gradients with it; one float32. Undefined: 1.

    /// If capturable, else undefined: [groups, 2] float64, learning rate and weight decay.
    at::Tensor rates;
    /// If capturable, else undefined: [n] float64, updates so far. The work adds 1 to those that
    /// its pieces name.
    at::Tensor counts;
  };

  /// @}

 protected:
  /// `lr` and `weight_decay` are the defaults of the groups.
  Optimizer(const Sharded& sharded, std::vector<ParamGroup> groups, double lr, double weight_decay,
            std::vector<std::string> state_names);

  /// Returns the work that updates all pieces: masters, shards and states. It owns the tensors it
  /// uses, because for units in host memory it runs later, in a thread of its own.
  virtual std::function<void()> prepare(const Update& what) const = 0;

 private:
  friend class MatrixOptimizer;
  friend optim::States& optim::states_of(const Optimizer& optimizer);
  explicit Optimizer(std::unique_ptr<optim::States> states);
  void update_on_device(shard::Engine& model, const at::Tensor& factor);
  void update_on_host(shard::Engine& model, shard::Flat& flat, size_t place,
                      const shard::HostFactor& factor);
  // Updates flats on the device, all at once.
  virtual void update_flats(shard::Engine& model, const std::vector<shard::Flat*>& flats,
                            const at::Tensor& factor);
  // Hands the updates of flats in host memory to the model's update thread. `flats`: with their
  // positions in forward.
  virtual void update_host_flats(shard::Engine& model,
                                 const std::vector<std::pair<shard::Flat*, size_t>>& flats,
                                 const shard::HostFactor& factor);

  std::unique_ptr<optim::States> states_;
};

/// Options of AdamW.
struct AdamWOptions {
  double lr = 1e-3;                                ///< Learning rate.
  std::pair<double, double> betas = {0.9, 0.999};  ///< Decay rates of the two averages.
  double eps = 1e-8;                               ///< Added to the denominator.
  double weight_decay = 1e-2;                      ///< Decoupled from the gradient.
  bool maximize = false;                           ///< Climb instead of descend.
  std::vector<ParamGroup> groups = {};             ///< Parameters with other settings.
};

/// Adam with decoupled weight decay. States: "exp_avg", "exp_avg_sq".
class AdamW : public Optimizer {
 public:
  /// Make it after the last fully_shard().
  explicit AdamW(const Sharded& sharded, AdamWOptions options = {});
  /// As given to the constructor.
  const AdamWOptions& options() const { return options_; }

 private:
  std::function<void()> prepare(const Update& what) const override;

  AdamWOptions options_;
};

/// Options of SGD.
struct SGDOptions {
  double lr = 1e-3;                     ///< Learning rate.
  double momentum = 0.0;                ///< 0: none.
  double dampening = 0.0;               ///< Reduces the gradient's part in the momentum.
  double weight_decay = 0.0;            ///< Added to the gradient.
  bool nesterov = false;                ///< Nesterov momentum.
  bool maximize = false;                ///< Climb instead of descend.
  std::vector<ParamGroup> groups = {};  ///< Parameters with other settings.
};

/// Stochastic gradient descent. State: "momentum_buffer", if there is momentum.
class SGD : public Optimizer {
 public:
  /// Make it after the last fully_shard().
  explicit SGD(const Sharded& sharded, SGDOptions options = {});
  /// As given to the constructor.
  const SGDOptions& options() const { return options_; }

 private:
  std::function<void()> prepare(const Update& what) const override;

  SGDOptions options_;
};

}  // namespace fsdp
