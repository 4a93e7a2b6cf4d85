#include "shard/tensor_access.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp::shard {
namespace {

struct Keys : c10::TensorImpl {  // key_set_ is protected
  static c10::DispatchKeySet c10::TensorImpl::*pointer() { return &Keys::key_set_; }
};

// The flag that makes raw reads throw has a public setter but can't be cleared. An explicit
// instantiation may name private members.
bool& raw_reads_throw(c10::StorageImpl& storage);
template <bool c10::StorageImpl::*Member>
struct Reach {
  friend bool& raw_reads_throw(c10::StorageImpl& storage) { return storage.*Member; }
};
template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

void tag_marker(void*) {}  // a deleter that marks the engine's storages

c10::DataPtr tagged(void* data, StorageTag* tag, at::Device device) {
  return {data, tag, &tag_marker, device};
}

StorageTag* tag_in(c10::StorageImpl& storage) {
  c10::DataPtr& pointer = storage._mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &tag_marker ? static_cast<StorageTag*>(pointer.get_context())
                                              : nullptr;
}

}  // namespace

void set_key(const at::Tensor& tensor, bool on) {
  c10::DispatchKeySet& keys = tensor.unsafeGetTensorImpl()->*Keys::pointer();
  keys = on ? keys.add(kKey) : keys.remove(kKey);
}

c10::intrusive_ptr<c10::StorageImpl> make_storage(size_t bytes, at::Device device, StorageTag* tag,
                                                  const std::string& message) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       tagged(nullptr, tag, device),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  return storage;
}

StorageTag* tag_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return tag_in(*tensor.storage().unsafeGetStorageImpl());
}

void point_at(c10::StorageImpl& storage, void* data) {
  raw_reads_throw(storage) = false;
  storage.set_data_ptr_noswap(tagged(data, tag_in(storage), storage.device()));
}

void take_away(c10::StorageImpl& storage) {
  raw_reads_throw(storage) = true;
  storage.set_data_ptr_noswap(tagged(nullptr, tag_in(storage), storage.device()));
}

void orphan(c10::StorageImpl& storage, const std::string& message) {
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

at::Tensor tensor_over(const c10::intrusive_ptr<c10::StorageImpl>& storage, at::ScalarType type,
                       at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(type).device(storage->device()));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(storage));
  impl->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

void become(const at::Tensor& tensor, const at::Tensor& other) {
  // A gradient accumulator remembers dtype and device; if they change, it must be created again.
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    std::lock_guard lock(meta->mutex_);
    auto accumulator = meta->grad_accumulator_.lock();
    if (accumulator && (tensor.dtype() != other.dtype() || tensor.device() != other.device()))
      meta->grad_accumulator_.reset();
  }
  bool keyed = has_key(tensor);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
  set_key(tensor, keyed);
}

}  // namespace fsdp::shard
