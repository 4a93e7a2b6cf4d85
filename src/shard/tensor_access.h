// What the engine does to LibTorch's tensors behind their backs, in one place: the dispatch key
// that makes operators on a tensor pass by us, and storages whose memory comes and goes.
//
// A storage of ours carries a tag where other storages keep their deleter's context, so that any
// tensor can be asked whose it is without a table or a lock. While its memory is away, a raw read
// (data_ptr, torch::save) throws the storage's message.
#pragma once

#include <ATen/core/Tensor.h>
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

// What the engine's own tensor operations run under: no graph, and not caught by our own key.
struct Unseen {
  at::NoGradGuard no_grad;
  c10::InferenceMode no_inference{false};
  c10::impl::ExcludeDispatchKeyGuard no_key{kKey};
};

// Whose a storage is. The owner must outlive it or call `orphan`.
struct StorageTag {
  enum Kind { kParameters, kGradients, kDeferred } kind;
  void* owner;  // Flat, Flat, deferred::Storage
};

// A storage of `bytes` without memory.
c10::intrusive_ptr<c10::StorageImpl> make_storage(size_t bytes, at::Device device, StorageTag* tag,
                                                  const std::string& message);
StorageTag* tag_of(const at::Tensor& tensor);  // null: not ours

void point_at(c10::StorageImpl& storage, void* data);
void take_away(c10::StorageImpl& storage);
// The owner goes; the storage stays without memory, and `message` says why.
void orphan(c10::StorageImpl& storage, const std::string& message);

// A tensor over `storage`.
at::Tensor tensor_over(const c10::intrusive_ptr<c10::StorageImpl>& storage, at::ScalarType type,
                       at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

// Makes `tensor` what `other` is (sizes, dtype, device, storage), as set_data does, but without its
// checks: it also leaves the meta device. Autograd's state stays.
void become(const at::Tensor& tensor, const at::Tensor& other);

}  // namespace fsdp::shard
