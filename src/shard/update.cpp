#include "shard/update.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <set>

#include "shard/background.h"
#include "shard/capture.h"
#include "shard/engine.h"
#include "shard/offload.h"
#include "shard/on_disk.h"

namespace fsdp::shard {

std::vector<Flat*> all_flats(const Engine& model) {
  return model.flats();
}

std::vector<Flat*> trainable_flats(const Engine& model) {
  std::vector<Flat*> trainable = model.flats();
  std::erase_if(trainable, [](const Flat* flat) { return !flat->trainable(); });
  return trainable;
}

void attach_optimizer(Engine& model, const void* optimizer, std::function<int64_t()> state_bytes,
                      std::function<int64_t()> host_bytes) {
  model.masters.attach(optimizer, std::move(state_bytes), std::move(host_bytes));
}

void detach_optimizer(Engine& model, const void* optimizer) {
  model.offload.stop_early_updates();  // they may belong to this optimizer
  model.masters.detach(optimizer);
}

void counts_moved(Engine& model) {
  ++model.changes;
}

// --- updates ---

at::Tensor begin_update(Engine& model) {
  model.masters.refuse_while_summoned("an update");
  // check() exchanges data between ranks, which no graph can; begin_replays does it for recorded
  // steps.
  if (model.background && !RecordsStep::now()) model.background->check();
  for (Flat* flat : model.flats())
    if (!updated_in_backward(*flat)) flat->await_update();
  model.offload.stop_early_updates();
  for (const auto& unit : model.units) {
    if (unit->meta)
      throw Error(unit->label() + " has no values yet.",
                  "call sharded.materialize(device), or load a checkpoint, before training.");
    for (const auto& flat : unit->flats)
      if (flat->slot)
        throw Error(
            unit->label() + ": its gradients were accumulated under no_sync() and never reduced.",
            "run the last backward of a step outside of no_sync().");
    if (unit->group->gather) unit->group->gather.check();
    if (unit->group->reduce) unit->group->reduce.check();
  }
  model.reducer.forget_cleared();
  model.gatherer.reshard_all();
  model.gatherer.synchronize_readers("an update");
  if (!RecordsStep::now()) before_change(model);
  return model.reducer.take_factor();
}

void end_update(Engine& model, bool shards_written) {
  if (!shards_written) {
    Unseen unseen;
    for (Flat* flat : model.flats()) flat->settle_master();
  }
  model.gatherer.shards_written();
  model.offload.end_early_updates();
  at::autocast::clear_cache();  // it holds casts of the old weights
}

void sum_over_ranks(Engine& model, at::Tensor tensor) {
  // Units may be sharded over different groups; each group is summed over once.
  std::set<const Group*> met;
  for (const auto& unit : model.units)
    if (unit->group->shard_size > 1 && met.insert(unit->group.get()).second)
      unit->group->reduce.all_reduce(tensor, ReduceOp::SUM, {.label = "a sum over shards"});
}

void reduce_loss(Engine& model, at::Tensor loss, bool average) {
  const Group& group = *model.units.back()->group;
  const CallOptions call{.label = "the loss of the step"};
  if (group.shard_size > 1) group.reduce.all_reduce(loss, ReduceOp::SUM, call);
  if (group.replicate_size > 1) group.replicate.all_reduce(loss, ReduceOp::SUM, call);
  const int ranks = group.shard_size * group.replicate_size;
  if (average && ranks > 1) loss.div_(static_cast<double>(ranks));
}

Travelling::Travelling(Engine& model, const Communicator& among, at::Tensor out, at::Tensor in,
                       std::vector<int64_t> out_counts, std::vector<int64_t> in_counts,
                       const CallOptions& call)
    : device_(model.device()) {
  int64_t others = in.numel();
  if (!in_counts.empty()) others -= in_counts[static_cast<size_t>(among.rank())];
  model.comm.traffic().all_to_all += others * element_bytes(in.scalar_type());
  CallOptions how = call;
  how.async = !has_streams(device_) && !device_.is_meta();
  StreamEvent ready;
  ready.record(device_);
  const OnStream beside(model.comm.reduce_stream());
  ready.wait(device_);
  work_ = model.comm.run(
      [&] { return among.all_to_all(out, in, std::move(out_counts), std::move(in_counts), how); });
  done_.record(device_);
}

void Travelling::wait() const {
  work_.wait();
  done_.wait(device_);
}

void zero_gradients(Engine& model, bool set_to_none) {
  model.reducer.zero(set_to_none);
}

// --- flats in host memory ---

bool offloads(const Engine& model) {
  return model.offload.in_use();
}

bool on_host(const Flat& flat) {
  return updated_on_host(flat);
}

std::vector<Flat*> host_flats(Engine& model) {
  std::vector<Flat*> found;
  for (Flat* flat : trainable_flats(model))
    if (updated_on_host(*flat)) found.push_back(flat);
  // The root holds what forward uses before and after the other units.
  std::stable_partition(found.begin(), found.end(),
                        [](const Flat* flat) { return flat->unit().root; });
  return found;
}

void await_updates(Engine& model) {
  for (Flat* flat : model.flats()) flat->await_update();
}

HostFactor bring_factor(Engine& model, const at::Tensor& factor) {
  if (!factor.defined() || !has_streams(factor.device())) return {factor, nullptr};
  HostFactor host{at::empty(factor.sizes(), factor.options().device(at::kCPU).pinned_memory(true)),
                  std::make_shared<StreamEvent>()};
  host.value.copy_(factor, /*non_blocking=*/true);
  host.arrived->record(model.device());
  return host;
}

void update_on_host(Engine& model, Flat& flat, size_t wanted, const HostFactor& factor,
                    std::function<void()> update) {
  HostWork work{.wanted = wanted};
  work.run = [host = flat.host, arrived = factor.arrived, update = std::move(update),
              label = flat.unit().label() + " " + kUpdateLabel] {
    host->left.synchronize();
    host->read.synchronize();
    if (arrived) arrived->synchronize();
    RECORD_USER_SCOPE(label);
    with_states(*host, update);
  };
  work.can_start = [host = flat.host, arrived = factor.arrived] {
    return host->left.passed() && (!arrived || arrived->passed());
  };
  // A factor arrives after every gradient; then only the order of forward matters.
  if (!factor.arrived) work.arrival = flat.host->arrival;
  flat.host->update = model.offload.add(std::move(work));
}

void update_in_backward(Engine& model, std::function<void(Engine& model, Flat& flat)> update) {
  model.offload.end_early_updates();
  before_change(model);
  if (!host_flats(model).empty())
    model.offload.update_early(
        [&model, update = std::move(update)](Flat& flat) { update(model, flat); });
}

bool updated_in_backward(const Flat& flat) {
  return flat.host && flat.host->stepped;
}

bool updated_in_backward(const Engine& model) {
  return std::any_of(model.units.begin(), model.units.end(),
                     [](const auto& unit) { return stepped_early(*unit); });
}

// --- flats copied to the device for their update ---

std::vector<Flat*> visiting_flats(Engine& model) {
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

void update_on_visit(Engine& model, Flat& flat, const std::function<void()>& update) {
  HostState& host = *flat.host;
  HostTensors kept(flat);
  host.read.wait(model.device());
  host.left.wait(model.device());
  if (gradient_on_host(flat)) {
    flat.grad = copied(kept.grad, model.device());
    host.left.record(model.device());  // it may be written or zeroed only after this
  }
  if (!shard_on_host(flat)) return update();
  flat.shard = copied(kept.shard, model.device());
  if (kept.master.is_same(kept.shard)) flat.master = flat.shard;
  update();
  model.offload.send_shard(flat, kept.shard);
}

}  // namespace fsdp::shard
