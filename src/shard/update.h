// What optimizers need of a sharded model: its flats, and the two ends of an update.
//
// Between begin_update and end_update the masters (and shards) may be written; no rank reads them
// then. On shared memory begin_update waits until every rank has come, so an update is collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "shard/flat.h"

namespace fsdp::shard {

class Model;

std::vector<Flat*> trainable_flats(Model& model);

// Makes an optimizer known, for memory() and so that clipping may leave its factor to the update.
void attach_optimizer(Model& model, const void* optimizer, std::function<int64_t()> state_bytes);
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

}  // namespace fsdp::shard
