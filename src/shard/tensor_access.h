// All access to internals of LibTorch's tensors, in one place: the dispatch key that routes a
// tensor's operators through the engine, and storages whose memory comes and goes.
//
// The engine's storages carry a tag in place of their deleter's context, so that the owner of any
// tensor can be found without a table or a lock. While a storage has no memory, a raw read
// (data_ptr, torch::save) throws the storage's message.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>

namespace fsdp::shard {

inline constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

void set_key(const at::Tensor& tensor, bool on);
inline bool has_key(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kKey);
}

// Whether an operator writes to this argument.
inline bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// The engine's own tensor operations run under this guard: no graph, no inference mode, no key.
struct Unseen {
  at::NoGradGuard no_grad;
  c10::InferenceMode no_inference{false};
  c10::impl::ExcludeDispatchKeyGuard no_key{kKey};
};

// The owner of a storage. It must outlive the storage or call `orphan`.
struct StorageTag {
  enum Contents { kParameters, kGradients, kMasters, kDeferred } kind;
  void* owner;  // Flat, Flat, Flat, deferred::Storage
};

// A storage of `bytes` without memory. `message` is thrown by raw reads.
c10::intrusive_ptr<c10::StorageImpl> make_storage(size_t bytes, at::Device device, StorageTag* tag,
                                                  const std::string& message);
StorageTag* tag_of(const at::Tensor& tensor);  // null: not one of the engine's

void point_at(c10::StorageImpl& storage, void* data);
void take_away(c10::StorageImpl& storage);
// Detaches the storage from its owner: it stays without memory, and raw reads throw `message`.
void orphan(c10::StorageImpl& storage, const std::string& message);

at::Tensor tensor_over(const c10::intrusive_ptr<c10::StorageImpl>& storage, at::ScalarType type,
                       at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

// Gives `tensor` the sizes, dtype, device and storage of `other`, as set_data does, but without its
// checks, so that a tensor can leave the meta device. Autograd metadata stays.
void become(const at::Tensor& tensor, const at::Tensor& other);

}  // namespace fsdp::shard
