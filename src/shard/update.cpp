#include "shard/update.h"

#include <ATen/autocast_mode.h>

#include <set>

#include "shard/model.h"

namespace fsdp::shard {

std::vector<Flat*> trainable_flats(Model& model) {
  std::vector<Flat*> trainable;
  for (Flat* flat : model.flats())
    if (flat->trainable()) trainable.push_back(flat);
  return trainable;
}

void attach_optimizer(Model& model, const void* optimizer, std::function<int64_t()> state_bytes) {
  std::lock_guard lock(model.mutex);
  model.optimizers[optimizer] = std::move(state_bytes);
}

void detach_optimizer(Model& model, const void* optimizer) {
  std::lock_guard lock(model.mutex);
  model.optimizers.erase(optimizer);
}

at::Tensor begin_update(Model& model) {
  std::lock_guard lock(model.mutex);
  if (model.background) model.background->check();
  for (const auto& unit : model.units) {
    if (unit->meta)
      throw Error("unit \"" + unit->name + "\" has no values yet.",
                  "call sharded.materialize(device), or load a checkpoint, before training.");
    for (const auto& flat : unit->flats)
      if (flat->slot)
        throw Error("unit \"" + unit->name +
                        "\": its gradients were accumulated under no_sync() and never reduced.",
                    "run the last backward before an update outside of no_sync().");
    if (unit->group->gather) unit->group->gather.check();
    if (unit->group->reduce) unit->group->reduce.check();
  }
  model.forget_cleared_gradients();
  model.give_up_all();
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
  at::autocast::clear_cache();  // of weights that are no longer these
}

void sum_over_ranks(Model& model, at::Tensor tensor) {
  // Units may be spread over different groups; a model of several is summed over all of them once.
  std::set<const Group*> met;
  for (const auto& unit : model.units)
    if (unit->group->shard_size > 1 && met.insert(unit->group.get()).second)
      unit->group->reduce.all_reduce(tensor, ReduceOp::SUM, {.label = "a sum over shards"});
}

void zero_gradients(Model& model, bool set_to_none) {
  model.zero_gradients(set_to_none);
}

}  // namespace fsdp::shard
