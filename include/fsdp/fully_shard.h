// fully_shard: shards a module's parameters, gradients and optimizer state over ranks, without
// changing the module.
//
//   auto world = fsdp::init();
//   Net model(…);
//   auto sharded = fsdp::fully_shard(model, {.wrap = fsdp::wrap::modules<Block>()});
//   fsdp::AdamW optimizer(sharded, {.lr = 3e-4});
//   model->forward(x).sum().backward();      // the model's own code
//   sharded.clip_grad_norm_(1.0);
//   optimizer.step();
//
// The module's parameters lose their memory; the first operator that reads one gathers its unit.
// The module stays sharded as long as it lives, whether or not the handle (Sharded) is kept. Every
// rank must run the same modules in the same order.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

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

namespace fsdp {

namespace shard {
class Model;
class Unit;
}  // namespace shard

struct ShardOptions {
  WrapPolicy wrap = {};
  ShardingStrategy strategy = ShardingStrategy::FULL_SHARD;
  MixedPrecision mixed_precision = {};
  ReshardAfterForward reshard_after_forward = {};
  DeviceMesh mesh = {};                   // {"shard"} or {"replicate", "shard"}; default: all
  std::optional<at::Device> device = {};  // parameters move there, unit by unit
  std::vector<at::Tensor> ignored_parameters = {};  // stay as they are on every rank
  bool sync_module_states = false;                  // rank 0's parameters and buffers for everybody
  int forward_prefetch = 1;                         // units gathered ahead in forward …
  int backward_prefetch = 1;                        // … and in backward
  bool limit_all_gathers = true;  // false: gathered units are not evicted to make room
  Cut cut = Cut::AUTO;
  Offload offload = {};
  bool share_host_memory = true;  // shm: ranks of a host read one copy of the parameters
  // false: a model of deferred_init is not initialised: its values will be loaded.
  bool initialize = true;
};

// A started unshard; wait() makes the parameters usable.
class UnshardWork {
 public:
  UnshardWork() = default;
  void wait();

 private:
  friend class Unit;
  friend class Sharded;
  std::vector<std::shared_ptr<shard::Unit>> units_;
};

// A unit: what is gathered and given up together.
class Unit {
 public:
  Unit() = default;
  explicit Unit(std::shared_ptr<shard::Unit> unit);

  const std::string& name() const;
  int64_t numel() const;  // parameters without padding
  bool is_unsharded() const;
  UnshardWork unshard(bool async = false) const;  // collective; writes to it are kept at reshard
  void reshard() const;
  void set_reshard_after_forward(ReshardAfterForward reshard) const;
  // Units to gather when this one is used, instead of those that came next the last time.
  void set_modules_to_forward_prefetch(const std::vector<Unit>& units) const;
  void set_modules_to_backward_prefetch(const std::vector<Unit>& units) const;

  explicit operator bool() const { return unit_ != nullptr; }
  bool operator==(const Unit& other) const { return unit_ == other.unit_; }

 private:
  friend class Sharded;
  std::shared_ptr<shard::Unit> unit_;
};

// While alive, backwards of the model accumulate gradients without communication.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<shard::Model> model);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<shard::Model> model_;
  bool before_;
};

struct SummonOptions {
  bool writeback = true;        // what is written to the parameters meanwhile is kept
  bool rank0_only = false;      // the other ranks see empty memory (and write nothing back)
  bool offload_to_cpu = false;  // values() lie in CPU memory
};

// While alive, every parameter of the model is whole. Collective, its end too.
class FullParams {
 public:
  FullParams(std::shared_ptr<shard::Model> model, SummonOptions options);
  ~FullParams() noexcept(false);
  FullParams(const FullParams&) = delete;
  FullParams& operator=(const FullParams&) = delete;

  // By the module's own names. Without offload_to_cpu these are the module's parameters.
  const std::map<std::string, at::Tensor>& values() const { return values_; }

 private:
  std::shared_ptr<shard::Model> model_;
  SummonOptions options_;
  std::map<std::string, at::Tensor> values_;
  int exceptions_;  // in flight when it was made
};

class Sharded {
 public:
  Sharded() = default;
  explicit Sharded(std::shared_ptr<shard::Model> model) : model_(std::move(model)) {}

  // --- training ---
  // This rank's flat shards of the trainable parameters, with their gradients after backward: what
  // any elementwise optimizer of torch::optim can update.
  std::vector<at::Tensor> parameters() const;
  // Scales gradients so that their norm over all ranks is at most max_norm; returns the norm
  // before, as a tensor of one float32 on the model's device. Collective; waits for no device.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0) const;
  void zero_grad(bool set_to_none = true) const;
  [[nodiscard]] std::unique_ptr<NoSync> no_sync() const;
  void set_requires_gradient_sync(bool sync) const;
  // Gradients are summed and divided by `factor`; 0: by the number of ranks, which is the default.
  void set_gradient_divide_factor(double factor) const;
  // Called with each reduced shard (reduce dtype) and its unit's name before it is accumulated.
  void set_reduce_hook(std::function<void(at::Tensor shard, const std::string& unit)> hook) const;
  // The loss to call backward on when ranks have unequal shares of a batch: gradients become the
  // average over everything, each rank weighing `weight` (its tokens). Collective.
  at::Tensor scale_loss(const at::Tensor& loss, double weight) const;
  // For a rank without data while the others take a step: takes part in their gathers and
  // reductions with gradients of zero. Needs two steps of the same shape before it.
  void zero_weight_step() const;

  // --- units ---
  std::vector<Unit> units() const;  // the root first
  Unit unit(const std::string& name) const;
  void unshard() const;
  void reshard() const;

  // --- looking ---
  std::string describe() const;  // the module tree with its units; "did I wrap it right?"
  ShardInfo shard_of(const std::string& parameter) const;
  at::Tensor full_tensor(const std::string& parameter) const;  // collective
  at::Tensor full_grad(const std::string& parameter) const;    // collective; undefined: none
  [[nodiscard]] std::unique_ptr<FullParams> summon_full_params(SummonOptions options = {}) const;
  MemoryReport memory() const;

  // --- state ---
  // With the module's own names, buffers too. Collective; only rank 0 gets it with rank0_only.
  StateDict full_state_dict(bool rank0_only = false, bool offload_to_cpu = true) const;
  std::map<std::string, ShardInfo> sharded_state_dict() const;
  void load_full_state_dict(const StateDict& state, bool strict = true) const;  // on every rank
  // Gives memory to a model built on the meta device, unit by unit. `init` fills one module's own
  // parameters in place; by default the module's reset_parameters.
  void materialize(at::Device device,
                   const std::function<void(torch::nn::Module& module)>& init = {}) const;

  // --- what happened, for tests and traces ---
  void record_events(bool on) const;
  std::vector<Event> events() const;
  Traffic traffic() const;  // since reset_traffic(); waits for the device while it is measured
  void reset_traffic() const;
  // On a GPU Traffic::exposed is measured only while this is on: two events a wait.
  void measure_exposed(bool on) const;
  // memory().activations, from zero: what autograd keeps for backward, in this whole process.
  void count_activations(bool on) const;

  const std::shared_ptr<shard::Model>& model() const { return model_; }
  explicit operator bool() const { return model_ != nullptr; }

 protected:
  at::Tensor output(at::Tensor tensor) const;  // cast to output_dtype
  template <typename T>
  T output(T other) const {
    return other;
  }

  std::shared_ptr<shard::Model> model_;
};

// Sharded with the module's own forward.
template <typename M>
class ShardedModule : public Sharded {
 public:
  ShardedModule(std::shared_ptr<shard::Model> model, M module)
      : Sharded(std::move(model)), module_(std::move(module)) {}

  template <typename... Arguments>
  auto forward(Arguments&&... arguments) const {
    M module = module_;
    return output(module->forward(std::forward<Arguments>(arguments)...));
  }
  M& module() { return module_; }

 private:
  M module_;
};

// A module held in any of the usual ways.
class ModuleRef {
 public:
  ModuleRef(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}  // NOLINT
  template <typename M>
  requires std::derived_from<M, torch::nn::Module> ModuleRef(const std::shared_ptr<M>& module)
      : module_(module) {}  // NOLINT
  template <typename M>
  ModuleRef(const torch::nn::ModuleHolder<M>& holder) : module_(holder.ptr()) {}  // NOLINT

  const std::shared_ptr<torch::nn::Module>& get() const { return module_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

namespace shard {
std::shared_ptr<Model> shard_modules(const std::vector<ModuleRef>& modules, ShardOptions options);
}

// Shards `module`: units by options.wrap, the rest as the root unit. Modules in it that were
// sharded before keep their units (bottom-up use). Collective over the mesh.
template <typename M>
requires std::constructible_from<ModuleRef, const M&> ShardedModule<M> fully_shard(
    M module, ShardOptions options = {}) {
  return ShardedModule<M>(shard::shard_modules({ModuleRef(module)}, std::move(options)), module);
}

// One unit of several modules.
Sharded fully_shard(std::initializer_list<ModuleRef> modules, ShardOptions options = {});

// A TorchScript module (torch::jit::load). Its profiling executor is switched off for the process,
// because its own differentiation would not see the parameters being gathered.
Sharded fully_shard(const torch::jit::Module& module, ShardOptions options = {});

bool is_sharded(const ModuleRef& module);  // whether it is the top of a unit
Unit unit_of(const ModuleRef& module);     // an Error that names the units if it is none

}  // namespace fsdp
