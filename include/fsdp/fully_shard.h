/// @file
/// Shards a module's parameters, gradients and optimizer state over ranks without changing the
/// module.
///
///     auto world = fsdp::init();
///     Net model(…);
///     auto sharded = fsdp::fully_shard(model, {.wrap = fsdp::wrap::modules<Block>()});
///     fsdp::AdamW optimizer(sharded, {.lr = 3e-4});
///     model->forward(x).sum().backward();      // the model's own code
///     sharded.clip_grad_norm_(1.0);
///     optimizer.step();
///
/// The parameters lose their memory. The first operator that reads one gathers its unit. The module
/// stays sharded as long as it lives, with or without a handle (Sharded). Every rank must run the
/// same modules in the same order.
///
/// Two marks at the end of a comment, here and in all headers:
///
/// - **Collective.** Every rank must make the call, in the same order as its other collectives.
/// - **Waits for the device.** The host blocks until the GPU has finished the work that the result
///   depends on.
///
/// Calls without a mark are local and, on a GPU, only queue work. On the CPU a call has finished
/// when it returns.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/shard_info.h"
#include "fsdp/sharding.h"
#include "fsdp/wrap.h"

namespace torch::jit {
struct Module;
}

/// Everything public.
namespace fsdp {

class Sharded;
namespace shard {
class Model;
class Unit;
std::shared_ptr<Model> model_of(const Sharded& sharded);
}  // namespace shard

/// Options of fully_shard().
struct ShardOptions {
  /// Which modules become units. Empty: the root is the only unit.
  WrapPolicy wrap = {};
  /// What is sharded, and what happens between forward and backward.
  ShardingStrategy strategy = ShardingStrategy::FULL_SHARD;
  /// Dtypes of parameters, gradients, buffers and masters.
  MixedPrecision mixed_precision = {};
  /// Overrides what the strategy does with a unit between its forward and its backward.
  ReshardAfterForward reshard_after_forward = {};
  /// With dimensions {"shard"} or {"replicate", "shard"}, and "context" if ranks share sequences
  /// (context_parallel.h). Default: all ranks of the world; for HYBRID_SHARD the ranks of a node
  /// shard, and nodes replicate.
  DeviceMesh mesh = {};
  /// Parameters and buffers move here, unit by unit. Default: the world's device.
  std::optional<at::Device> device = {};
  /// Parameters to leave out: whole on every rank, not moved, their gradients not reduced.
  std::vector<at::Tensor> ignored_parameters = {};
  /// Broadcasts rank 0's parameters and buffers.
  bool sync_module_states = false;
  /// Number of units gathered ahead in forward.
  int forward_prefetch = 1;
  /// Number of units gathered ahead in backward.
  int backward_prefetch = 1;
  /// Gathered units share 2 + prefetch depth buffers (one without prefetch), and the least recently
  /// used unit is evicted. False: buffers are added instead.
  bool limit_all_gathers = true;
  /// Where flat buffers are cut into shards. Doesn't change results.
  Cut cut = Cut::AUTO;
  /// What to keep in host memory or files.
  Offload offload = {};
  /// Backend shm: the ranks of a host read one copy of the parameters. False: each gathers its own.
  bool share_host_memory = true;
  /// False: a module from deferred_init() isn't initialized. Its values will be loaded, or set by
  /// init_parameters().
  bool initialize = true;
  /// Some ranks may use a unit in a step and others not: experts, stochastic depth, early exit. For
  /// all units other than the root. Ranks agree before each backward on the units that take part,
  /// and a rank that didn't use one adds zeros. Such a unit is gathered together with the unit
  /// around it, on every rank. Usually set for the units in question:
  /// wrap::names({"**.experts.*"}, {.uneven_use = true}). Not needed if every rank gets a gradient
  /// for some parameter of the unit.
  bool uneven_use = false;
};

/// A started Unit::unshard(). wait() makes the parameters usable.
class UnshardHandle {
 public:
  UnshardHandle() = default;
  /// Pins the unit as a blocking unshard() does. Collective.
  void wait();

 private:
  friend class Unit;
  friend class Sharded;
  std::vector<std::shared_ptr<shard::Unit>> units_;
};

/// A module held in any of the usual ways. Converts implicitly.
class ModuleRef {
 public:
  /// From a shared pointer to the base class.
  ModuleRef(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}  // NOLINT
  /// From a shared pointer to a derived module.
  template <typename M>
  requires std::derived_from<M, torch::nn::Module> ModuleRef(const std::shared_ptr<M>& module)
      : module_(module) {}  // NOLINT
  /// From a holder, as TORCH_MODULE defines it.
  template <typename M>
  ModuleRef(const torch::nn::ModuleHolder<M>& holder) : module_(holder.ptr()) {}  // NOLINT

  /// The module.
  const std::shared_ptr<torch::nn::Module>& get() const { return module_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

/// A unit: the parameters that are gathered and resharded together. A shared handle.
class Unit {
 public:
  /// A handle to no unit.
  Unit() = default;
  /// Sharded::unit() and unit_of() make handles.
  explicit Unit(std::shared_ptr<shard::Unit> unit);
  /// The unit of a module: unit_of(module).
  template <typename Module>
  requires std::convertible_to<const Module&, ModuleRef> Unit(
      const Module& module);  // NOLINT: implicit, for lists of modules

  /// Path of its module ("layers.7"); "root".
  const std::string& name() const;
  /// Elements of its parameters, without padding.
  int64_t numel() const;
  /// Whether its parameters are gathered.
  bool is_unsharded() const;
  /// Gathers the unit and pins it until reshard(). With `async_op` the gather only starts, and
  /// wait() pins the unit. Writing to the parameters is an Error at reshard(): use
  /// Sharded::summon_full_params(). Collective.
  UnshardHandle unshard(bool async_op = false) const;
  /// Unpins the unit and frees its gathered parameters.
  void reshard() const;
  /// Changes what happens between this unit's forward and backward. Collective for a number of
  /// parts.
  void set_reshard_after_forward(ReshardAfterForward reshard) const;
  /// Units (or modules) to gather ahead when forward uses this one, in place of those that followed
  /// it in the last step. Empty: the learned order again. The same on every rank.
  void set_modules_to_forward_prefetch(const std::vector<Unit>& units) const;
  /// The same for backward.
  void set_modules_to_backward_prefetch(const std::vector<Unit>& units) const;

  /// Whether it refers to a unit.
  explicit operator bool() const { return unit_ != nullptr; }
  /// Whether both refer to the same unit.
  bool operator==(const Unit& other) const { return unit_ == other.unit_; }

 private:
  friend class Sharded;
  std::shared_ptr<shard::Unit> unit_;
};

/// While alive, backward accumulates whole gradients on each rank and doesn't communicate.
///
/// The next backward after it reduces the sum. Made by Sharded::no_sync().
class NoSync {
 public:
  /// Use Sharded::no_sync().
  explicit NoSync(std::shared_ptr<shard::Model> model);
  /// Restores the earlier setting.
  ~NoSync();
  /// The other one then does nothing.
  NoSync(NoSync&& other) noexcept = default;
  NoSync& operator=(NoSync&&) = delete;

 private:
  std::shared_ptr<shard::Model> model_;
  bool before_;
};

/// Options of Sharded::summon_full_params().
struct SummonOptions {
  bool writeback = true;        ///< Keep what is written to the parameters in the meantime.
  bool rank0_only = false;      ///< Only rank 0 gets values and may write; the others receive that.
  bool offload_to_cpu = false;  ///< values() are copies in CPU memory.
};

/// While alive, every parameter of the model is whole.
///
/// Made by Sharded::summon_full_params(). Construction and destruction are collective.
class FullParams {
 public:
  /// Use Sharded::summon_full_params().
  FullParams(std::shared_ptr<shard::Model> model, SummonOptions options);
  /// Writes back and reshards. Writes nothing while an exception unwinds. Collective.
  ~FullParams() noexcept(false);
  /// The other one then does nothing.
  FullParams(FullParams&& other) noexcept = default;
  FullParams& operator=(FullParams&&) = delete;

  /// Whole parameters in param_dtype by the module's names. Without offload_to_cpu they are the
  /// module's own tensors.
  const std::map<std::string, at::Tensor>& values() const { return values_; }

 private:
  std::shared_ptr<shard::Model> model_;
  SummonOptions options_;
  std::map<std::string, at::Tensor> values_;
  int exceptions_;  // in flight when it was made
};

/// A sharded model: a shared handle to what fully_shard() attached to a module.
///
/// Copies refer to the same model, so every method is const. Dropping the handle doesn't unshard
/// the module. When a larger module is sharded later (bottom-up), handles of its parts refer to the
/// larger model. A default-constructed handle refers to none, and its methods throw Error.
///
/// Parameters go by the names they have in the module; a tied parameter has several. Only one
/// thread at a time may use a sharded model, autograd's own threads aside.
class Sharded {
 public:
  /// A handle to no model.
  Sharded() = default;
  /// fully_shard() makes handles.
  explicit Sharded(std::shared_ptr<shard::Model> model) : model_(std::move(model)) {}

  /// @name Training
  /// @{

  /// This rank's part of every trainable parameter: 1-d, float32 or whatever the masters are, with
  /// a gradient after backward. Any elementwise optimizer of torch::optim can update them, and so
  /// can any operator that writes in place: the engine sees the write and gathers again. From the
  /// first call on, each gather looks for changes, which costs time; fsdp::AdamW, fsdp::SGD and
  /// fsdp::optim::wrap() don't need this. Parameters that are unfrozen later are in the next call's
  /// result.
  std::vector<at::Tensor> parameters() const;
  /// The same with the parameters' names in the module.
  std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;
  /// The same tensors for one writer: update_parameters() alone may write to them, so gathers
  /// needn't look for changes. fsdp::optim::wrap() uses this.
  std::vector<at::Tensor> parameters_to_update() const;
  /// Calls `write`, which may write to parameters_to_update() and mustn't use the module. No rank
  /// reads parameters meanwhile. Collective.
  void update_parameters(const std::function<void()>& write) const;
  /// Moves every parameter towards that of another sharded model: this += weight * (other - this).
  /// Both must be the same model, sharded in the same way. For averages of weights and for
  /// teachers. Collective.
  void lerp_parameters(const Sharded& other, double weight) const;
  /// Scales the gradients so that their norm over all ranks is at most `max_norm`, and returns the
  /// norm from before: one float32 on the model's device. Call it between the last backward and the
  /// update. An fsdp optimizer applies the factor in its step(). Collective.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0) const;
  /// Clears the gradients, and a clip factor that no update has used.
  void zero_grad(bool set_to_none = true) const;
  /// Turns gradient reduction off while the returned object lives: for all micro-batches of a step
  /// but the last.
  [[nodiscard]] NoSync no_sync() const;
  /// The same switch without a scope. The same on every rank.
  void set_requires_gradient_sync(bool sync) const;
  /// Divides summed gradients by `factor` instead of the number of ranks. 0: the number of ranks
  /// again. The same on every rank.
  void set_gradient_divide_factor(double factor) const;
  /// Calls `hook` with each reduced shard (in reduce_dtype, or as MixedPrecision::reduce sums it)
  /// and its unit's name, before the shard is divided and accumulated. It may change the shard. On
  /// a GPU the reduction's stream is current. An empty function removes the hook.
  void set_reduce_hook(std::function<void(at::Tensor shard, const std::string& unit)> hook) const;
  /// The loss to call backward on when ranks have unequal parts of a batch: gradients become the
  /// average over all of it, with this rank's part weighted by `weight` (its number of tokens).
  /// Collective. Waits for the device.
  at::Tensor scale_loss(const at::Tensor& loss, double weight) const;
  /// Takes the place of forward and backward on a rank without data: takes part in the other ranks'
  /// gathers and reductions with zero gradients. Needs two steps of the same shape before it.
  /// Collective.
  void zero_weight_step() const;

  /// @}
  /// @name Units
  /// @{

  /// All units, the root first.
  std::vector<Unit> units() const;
  /// A unit by name. Throws Error with the known names.
  Unit unit(const std::string& name) const;
  /// Gathers and pins every unit: Unit::unshard(). Collective.
  void unshard() const;
  /// Unpins and reshards every unit: Unit::reshard().
  void reshard() const;

  /// @}
  /// @name Inspection
  /// @{

  /// The module tree with its units, their sizes and dtypes, and what a rank holds, as text.
  std::string describe() const;
  /// Where a parameter is, with this rank's part of its master and gradient.
  ShardInfo shard_of(const std::string& parameter) const;
  /// A whole parameter, copied from the masters. Collective.
  at::Tensor full_tensor(const std::string& parameter) const;
  /// A whole gradient, or an undefined tensor if there is none. Collective.
  at::Tensor full_grad(const std::string& parameter) const;
  /// Makes every parameter whole while the returned object lives. Collective. Waits for the device
  /// with offload_to_cpu.
  [[nodiscard]] FullParams summon_full_params(SummonOptions options = {}) const;
  /// Bytes that the engine holds on this rank, by kind.
  MemoryReport memory() const;

  /// @}
  /// @name State
  /// @{

  /// All parameters (from the masters) and buffers, whole. With rank0_only the other ranks get an
  /// empty one. For large models prefer checkpoint::save(). Collective. Waits for the device with
  /// offload_to_cpu.
  StateDict full_state_dict(bool rank0_only = false, bool offload_to_cpu = true) const;
  /// shard_of() every parameter, by name. checkpoint::state_dict() returns sharded state dicts.
  std::map<std::string, ShardInfo> shards() const;
  /// Sets parameters and buffers. Every rank passes the whole state; all names and shapes are
  /// checked before anything is written. With `strict`, missing and unknown names are an Error.
  /// Collective. Waits for the device.
  void load_full_state_dict(const StateDict& state, bool strict = true) const;
  /// Gives memory and values to a model that was built on the meta device, unit by unit. `init`
  /// fills one module's own parameters in place; by default the module's reset_parameters() does.
  /// Every rank runs it and keeps its part, so seed all ranks alike. Collective.
  void materialize(at::Device device,
                   const std::function<void(torch::nn::Module& module)>& init = {}) const;

  /// @}
  /// @name Measurement
  /// @{

  /// Starts (or stops) recording events, and drops those recorded so far.
  void record_events(bool on) const;
  /// The recorded events, oldest first.
  std::vector<Event> events() const;
  /// Bytes and times of communication since reset_traffic(). Waits for the device while
  /// measure_exposed() is on.
  Traffic traffic() const;
  /// Sets traffic() to zero. Waits for the device while measure_exposed() is on.
  void reset_traffic() const;
  /// On a GPU, Traffic::exposed is measured only while this is on. It costs two events per wait.
  void measure_exposed(bool on) const;
  /// Starts (or stops) counting MemoryReport::activations from zero. Counts the whole process, not
  /// only this model.
  void count_activations(bool on) const;

  /// @}

  /// Whether it refers to a model.
  explicit operator bool() const { return model_ != nullptr; }

 protected:
  /// Casts a floating-point tensor to output_dtype.
  at::Tensor output(at::Tensor tensor) const;
  /// Returns anything else unchanged.
  template <typename T>
  T output(T other) const {
    return other;
  }

  std::shared_ptr<shard::Model> model_;  ///< The engine; null for a handle to no model.

 private:
  friend std::shared_ptr<shard::Model> shard::model_of(const Sharded& sharded);
};

/// Sharded with the module and its forward.
template <typename M>
class ShardedModule : public Sharded {
 public:
  /// fully_shard() makes it.
  ShardedModule(std::shared_ptr<shard::Model> model, M module)
      : Sharded(std::move(model)), module_(std::move(module)) {}

  /// Calls module->forward() and casts a tensor that it returns to output_dtype. Collective, as
  /// every forward and backward of a sharded module is.
  template <typename... Arguments>
  auto forward(Arguments&&... arguments) const {
    M module = module_;
    return output(module->forward(std::forward<Arguments>(arguments)...));
  }
  /// The module that was passed to fully_shard().
  M& module() { return module_; }

 private:
  M module_;
};

namespace shard {
std::shared_ptr<Model> shard_modules(const std::vector<ModuleRef>& modules, ShardOptions options);
}

/// Shards `module`: the modules that options.wrap chooses become units, the rest the root unit.
/// Modules in it that were sharded before keep their units (bottom-up use). Collective over the
/// mesh. Waits for the device.
template <typename M>
requires std::constructible_from<ModuleRef, const M&> ShardedModule<M> fully_shard(
    M module, ShardOptions options = {}) {
  return ShardedModule<M>(shard::shard_modules({ModuleRef(module)}, std::move(options)), module);
}

/// Makes one unit of several modules. Collective over the mesh. Waits for the device.
Sharded fully_shard(std::initializer_list<ModuleRef> modules, ShardOptions options = {});

/// Shards a TorchScript module (torch::jit::load). Turns TorchScript's profiling executor off for
/// the process, because its own differentiation would read parameters that aren't gathered.
/// Collective over the mesh. Waits for the device.
Sharded fully_shard(const torch::jit::Module& module, ShardOptions options = {});

/// Whether the module is the top of a unit.
bool is_sharded(const ModuleRef& module);
/// The unit that the module is the top of. Throws Error with the known units if it isn't one.
Unit unit_of(const ModuleRef& module);

template <typename Module>
requires std::convertible_to<const Module&, ModuleRef> Unit::Unit(const Module& module)
    : Unit(unit_of(ModuleRef(module))) {}

}  // namespace fsdp
