// Deferred construction: a module built without memory, and how its tensors get their values later.
//
// While recording, every operator runs on shapes only and is kept. Its results are tensors without
// memory (StorageTag::kDeferred) whose values can be had at any time by running what was kept: bit
// for bit what plain construction would have given, whatever is asked for first. Random operators
// advance the generator while recording, as they would have, and keep its state from before.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fsdp::shard::deferred {

// Whether this thread is inside deferred_init; the key's fallback hands every operator over then.
bool recording();
void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

bool is_deferred(const at::Tensor& tensor);
// The tensor's value in memory of its own; the tensor stays deferred.
at::Tensor value(const at::Tensor& tensor);
// Gives the tensor (and everything that shares its storage) its memory for good.
void materialize(const at::Tensor& tensor);

}  // namespace fsdp::shard::deferred
