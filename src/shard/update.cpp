#include "shard/update.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "shard/capture.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/on_disk.h"

namespace fsdp::shard {

std::vector<Flat*> trainable_flats(Model& model) {
  std::vector<Flat*> trainable;
  for (Flat* flat : model.flats())
    if (flat->trainable()) trainable.push_back(flat);
  return trainable;
}

void attach_optimizer(Model& model, const void* optimizer, std::function<int64_t()> state_bytes,
                      std::function<int64_t()> host_bytes) {
  std::lock_guard lock(model.mutex);
  model.optimizers[optimizer] = std::move(state_bytes);
  model.host_states[optimizer] = std::move(host_bytes);
}

void detach_optimizer(Model& model, const void* optimizer) {
  std::lock_guard lock(model.mutex);
  model.early_update = nullptr;  // it may belong to this optimizer
  model.optimizers.erase(optimizer);
  model.host_states.erase(optimizer);
}

// --- masters that others write ---

namespace {

at::Tensor in_host_memory(const Flat& flat, const at::Tensor& gradient) {
  return host_zeros(gradient.numel(), gradient.scalar_type(), flat.device(), flat.host->pinned)
      .copy_(gradient);
}

// torch::optim::LBFGS takes dot products of what it believes are whole gradients. Nothing but the
// stack tells who writes.
bool called_by_lbfgs() {
  void* frames[64];
  const int count = backtrace(frames, 64);
  for (int i = 0; i < count; ++i) {
    Dl_info symbol;
    if (dladdr(frames[i], &symbol) != 0 && symbol.dli_sname &&
        std::strstr(symbol.dli_sname, "5torch5optim5LBFGS"))
      return true;
  }
  return false;
}

}  // namespace

void Model::hand_out_masters(Handed to) {
  std::lock_guard lock(mutex);
  Unseen unseen;
  for (const auto& unit : units)
    if (unit->meta)
      throw Error("unit \"" + unit->name + "\" has no values yet.",
                  "call sharded.materialize(device) before creating an optimizer.");
  for (Flat* flat : flats())
    if (flat->trainable() && flat->host && !updated_on_host(*flat))
      throw Error(
          "unit \"" + flat->unit().name +
              "\": torch::optim would find its parameters and gradients on different devices "
              "(offload.parameters or offload.gradients without offload.optimizer).",
          "use fsdp::AdamW or fsdp::SGD, or set offload.optimizer = true as well.");
  forget_cleared_gradients();
  settle_factor();
  handed = std::max(handed, to);
  for (Flat* flat : flats()) {
    if (!flat->trainable() || !flat->shard.defined()) continue;
    if (!flat->handed_out()) {
      flat->settle();
      flat->await_gradient();
      if (flat->grad_memory.defined() && flat->grad_memory.scalar_type() != flat->master_dtype()) {
        at::Tensor grad = flat->grad.defined() ? flat->grad.to(flat->master_dtype()) : at::Tensor();
        flat->release_gradient_memory();
        flat->grad_memory.reset();
        flat->grad = grad.defined() && gradient_on_host(*flat) ? in_host_memory(*flat, grad) : grad;
        flat->grad_memory = flat->grad;
      }
    }
    flat->hand_out();
    // Other ranks may still read the shared memory while this rank's owner of the masters writes.
    if (handed == Handed::kOut) flat->own_the_master();
    flat->show_gradients();
  }
}

void Model::refuse_while_summoned(const std::string& what) const {
  if (summoned == 0) return;
  throw Error("rank " + std::to_string(world.rank()) + ": " + what +
                  " isn't possible while summon_full_params() is alive: it would be overwritten.",
              "let the object that summon_full_params() returned go out of scope first.");
}

void Model::before_write(Unit& unit, const char* by) {
  std::lock_guard lock(mutex);
  refuse_while_summoned("unit \"" + unit.name + "\": an update (" + by + ")");
  if (handed != Handed::kOut)
    throw Error("unit \"" + unit.name + "\": " + by +
                    " writes to its masters outside of the wrapped optimizer's step().",
                "write inside sharded.update_parameters(), or to sharded.parameters().");
  if (!std::exchange(writer_known_, true) && called_by_lbfgs())
    throw Error("torch::optim::LBFGS can't update a sharded model: it takes dot products of whole "
                "gradients, and each rank has a part of them.",
                "use an elementwise optimizer, such as fsdp::AdamW or torch::optim::SGD.");
  if (unit.busy > 0)
    throw Error("unit \"" + unit.name + "\": " + by +
                    " writes to its masters while an operator uses it.",
                "call optimizer.step() after backward, not in a hook.");
  reshard(unit);  // what is gathered is older than the masters from now on
  for (const auto& flat : unit.flats) {
    flat->settle();
    flat->bump_versions();
  }
}

// --- updates ---

at::Tensor begin_update(Model& model) {
  std::lock_guard lock(model.mutex);
  model.refuse_while_summoned("an update");
  // check() exchanges data between ranks, which no graph can; begin_replays does it for recorded
  // steps.
  if (model.background && !RecordsStep::now()) model.background->check();
  for (Flat* flat : model.flats())
    if (!updated_in_backward(*flat)) flat->await_update();
  model.early_update = nullptr;
  for (const auto& unit : model.units) {
    if (unit->meta)
      throw Error("unit \"" + unit->name + "\" has no values yet.",
                  "call sharded.materialize(device), or load a checkpoint, before training.");
    for (const auto& flat : unit->flats)
      if (flat->slot)
        throw Error("unit \"" + unit->name +
                        "\": its gradients were accumulated under no_sync() and never reduced.",
                    "run the last backward of a step outside of no_sync().");
    if (unit->group->gather) unit->group->gather.check();
    if (unit->group->reduce) unit->group->reduce.check();
  }
  model.forget_cleared_gradients();
  model.reshard_all();
  model.synchronize_readers("an update");
  return std::exchange(model.factor, at::Tensor());
}

void end_update(Model& model, bool shards_written) {
  std::lock_guard lock(model.mutex);
  if (!shards_written) {
    Unseen unseen;
    for (Flat* flat : model.flats()) flat->settle_master();
  }
  model.shards_written();
  model.end_early_updates();
  at::autocast::clear_cache();  // it holds casts of the old weights
}

void sum_over_ranks(Model& model, at::Tensor tensor) {
  std::lock_guard lock(model.mutex);
  // Units may be sharded over different groups; each group is summed over once.
  std::set<const Group*> met;
  for (const auto& unit : model.units)
    if (unit->group->shard_size > 1 && met.insert(unit->group.get()).second)
      unit->group->reduce.all_reduce(tensor, ReduceOp::SUM, {.label = "a sum over shards"});
}

void zero_gradients(Model& model, bool set_to_none) {
  model.zero_gradients(set_to_none);
}

// --- flats in host memory ---

bool on_host(const Flat& flat) {
  return updated_on_host(flat);
}

std::vector<Flat*> host_flats(Model& model) {
  std::vector<Flat*> found;
  for (Flat* flat : trainable_flats(model))
    if (updated_on_host(*flat)) found.push_back(flat);
  // The root holds what forward uses before and after the other units.
  std::stable_partition(found.begin(), found.end(),
                        [](const Flat* flat) { return flat->unit().root; });
  return found;
}

void await_updates(Model& model) {
  std::lock_guard lock(model.mutex);
  for (Flat* flat : model.flats()) flat->await_update();
}

HostFactor bring_factor(Model& model, const at::Tensor& factor) {
  if (!factor.defined() || !has_streams(factor.device())) return {factor, nullptr};
  HostFactor host{at::empty(factor.sizes(), factor.options().device(at::kCPU).pinned_memory(true)),
                  std::make_shared<StreamEvent>()};
  host.value.copy_(factor, /*non_blocking=*/true);
  host.arrived->record(model.device);
  return host;
}

namespace {

struct HandingOver {
  explicit HandingOver(Model& of) : model(of) {}
  ~HandingOver() { model.handed_over = nullptr; }
  Model& model;
};

}  // namespace

void update_on_host(Model& model, Flat& flat, size_t wanted, const HostFactor& factor, bool at_once,
                    const std::function<void()>& update) {
  auto ready = [host = flat.host, arrived = factor.arrived] {
    host->left.synchronize();
    host->read.synchronize();
    if (arrived) arrived->synchronize();
  };
  flat.await_update();
  if (at_once) {
    ready();
    return with_states(*flat.host, update);
  }
  std::vector<std::function<void()>> kernels;
  {
    HandingOver handing(model);
    model.handed_over = &kernels;
    update();
  }
  HostWork work{.wanted = wanted};
  work.run = [ready, host = flat.host, kernels = std::move(kernels),
              label = "unit \"" + flat.unit().name + "\" " + kUpdateLabel] {
    ready();
    RECORD_USER_SCOPE(label);
    with_states(*host, [&] {
      for (const auto& kernel : kernels) kernel();
    });
  };
  work.can_start = [host = flat.host, arrived = factor.arrived] {
    return host->left.passed() && (!arrived || arrived->passed());
  };
  // A factor arrives after every gradient; then only the order of forward matters.
  if (!factor.arrived) work.arrival = flat.host->arrival;
  flat.host->update = model.host_updates->add(std::move(work));
}

void update_in_backward(Model& model, std::function<void(Flat& flat)> update) {
  std::lock_guard lock(model.mutex);
  model.end_early_updates();
  if (!host_flats(model).empty()) model.early_update = std::move(update);
}

bool updated_in_backward(const Flat& flat) {
  return flat.host && flat.host->stepped;
}

// --- flats copied to the device for their update ---

std::vector<Flat*> visiting_flats(Model& model) {
  std::vector<Flat*> found;
  for (Flat* flat : trainable_flats(model))
    if (flat->host && !updated_on_host(*flat)) found.push_back(flat);
  return found;
}

namespace {

// A flat's tensors in host memory; restored at the end of the scope.
struct HostTensors {
  explicit HostTensors(Flat& of) : flat(of), shard(of.shard), master(of.master), grad(of.grad) {}
  ~HostTensors() {
    flat.shard = shard;
    flat.master = master;
    flat.grad = grad;
  }
  HostTensors(const HostTensors&) = delete;
  HostTensors& operator=(const HostTensors&) = delete;

  Flat& flat;
  at::Tensor shard, master, grad;
};

at::Tensor copied(const at::Tensor& tensor, at::Device device) {
  at::Tensor copy = at::empty(tensor.sizes(), tensor.options().device(device).pinned_memory(false));
  return copy.copy_(tensor, /*non_blocking=*/true);
}

}  // namespace

void update_on_visit(Model& model, Flat& flat, const std::function<void()>& update) {
  HostState& host = *flat.host;
  HostTensors kept(flat);
  host.read.wait(model.device);
  host.left.wait(model.device);
  if (gradient_on_host(flat)) {
    flat.grad = copied(kept.grad, model.device);
    host.left.record(model.device);  // it may be written or zeroed only after this
  }
  if (!shard_on_host(flat)) return update();
  flat.shard = copied(kept.shard, model.device);
  if (kept.master.is_same(kept.shard)) flat.master = flat.shard;
  update();
  model.send_shard_to_host(flat, kept.shard);
}

void run_update(Model& model, std::function<void()> kernels) {
  if (model.handed_over) return model.handed_over->push_back(std::move(kernels));
  RECORD_USER_SCOPE(kUpdateLabel);
  kernels();
}

}  // namespace fsdp::shard
