// Deferred construction: builds a module without memory and computes its tensors later.
//
// While recording, every operator runs on shapes only and is put on a tape. Its results are tensors
// without memory (StorageTag::kDeferred). Replaying the tape gives their values at any time and in
// any order, bit for bit those of plain construction. Random operators advance the generator while
// recording, as in plain construction, and the tape keeps its state from before. The usual ones
// don't run until then (deferred_draw.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

namespace torch::nn {
class Module;
}

namespace fsdp::shard::deferred {

struct Draw;  // deferred_draw.h

// Whether this thread is inside deferred_init. The key's fallback then passes every operator to
// record().
bool recording();
void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

bool is_deferred(const at::Tensor& tensor);
// The tensor's value, in new memory; the tensor stays deferred.
at::Tensor value(const at::Tensor& tensor);
// The draw that made all of the tensor's values, in order; null if there is more to them.
std::shared_ptr<const Draw> draw_behind(const at::Tensor& tensor);
// Gives the tensor, and everything that shares its storage, its memory for good.
void materialize(const at::Tensor& tensor);
// Gives the deferred parameters of a module memory on `device`, with any values, for good.
void allocate(torch::nn::Module& module, at::Device device);

}  // namespace fsdp::shard::deferred
