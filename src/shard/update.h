// What optimizers need of a sharded model: its flats, and the two ends of an update.
//
// Between begin_update and end_update the masters (and shards) may be written; no rank reads them
// then. On shared memory begin_update waits until every rank has come, so an update is collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "shard/flat.h"

namespace fsdp::shard {

class Model;

std::vector<Flat*> trainable_flats(Model& model);

// Makes an optimizer known, for memory() and so that clipping may leave its factor to the update.
// `host_bytes`: of the states that lie in host memory.
void attach_optimizer(Model& model, const void* optimizer, std::function<int64_t()> state_bytes,
                      std::function<int64_t()> host_bytes);
void detach_optimizer(Model& model, const void* optimizer);

// Gives up every gathered unit. Returns the factor that gradients must still be multiplied with
// (one float32 on the model's device, from clip_grad_norm_), undefined for none; it is taken with
// that.
at::Tensor begin_update(Model& model);
// The masters have changed. `shards_written`: whether the shards (where they are tensors of their
// own) were written too; else they are written from the masters before the next gather.
void end_update(Model& model, bool shards_written);

// The sum of one tensor over all ranks that hold other shards of this model, for norms and for
// counting infinities: in place, on the device, in stream order. Collective.
void sum_over_ranks(Model& model, at::Tensor tensor);

void zero_gradients(Model& model, bool set_to_none);

// --- flats in host memory (offload.h), between begin_update and end_update ---

bool on_host(const Flat& flat);
// Those of the flats, in the order in which forward will want them.
std::vector<Flat*> host_flats(Model& model);
// Every update that is under way is done.
void await_updates(Model& model);

// The factor of an update as the host will see it.
struct HostFactor {
  at::Tensor value;              // undefined for none
  std::shared_ptr<Moment> come;  // when it may be read; null: at once
};
HostFactor bring_factor(Model& model, const at::Tensor& factor);

// Calls `update`, which hands its kernels to run_update: they run later, in the model's thread,
// when the gradient and the factor have come and the device has read the shard. Who wants the flat
// waits for them. `at_once`: waits for all that first, and `update` may do the work itself.
// `wanted`: the flat's place in forward.
void update_on_host(Model& model, Flat& flat, size_t wanted, const HostFactor& factor, bool at_once,
                    const std::function<void()>& update);
// From now until the next update or zero_grad, gradients of host_flats() are used as they come:
// `update` is called in backward, for every flat of a unit when the last has come. A flat that was
// updated so is skipped by step(). Nothing may clip or change gradients in between.
void update_in_backward(Model& model, std::function<void(Flat& flat)> update);
bool updated_in_backward(const Flat& flat);

// Flats of which only the shard or the gradient lies in host memory.
std::vector<Flat*> visiting_flats(Model& model);
// Calls `update` while both are copies on the device, in the flat's own fields; then the shard goes
// back, beside what the device does next.
void update_on_visit(Model& model, Flat& flat, const std::function<void()>& update);

// Profilers see them under the unit's name and this.
inline constexpr const char* kUpdateLabel = "(update)";
// Runs an update's kernels: at once, or as update_on_host says. They must hold what they use.
void run_update(Model& model, std::function<void()> kernels);

}  // namespace fsdp::shard
