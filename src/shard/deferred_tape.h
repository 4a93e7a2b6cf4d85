// The tape of deferred construction: what was run to make each tensor, and running it again.
//
// A storage without memory knows the last operator that wrote to it, and an operator those that
// must run before it. References point back in time only, so that the tape has no cycles and
// whatever no living tensor needs any more is freed. A storage's contents are had by running the
// operators it needs, in the order they were recorded, with one buffer per storage that goes after
// its last use.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <memory>
#include <vector>

#include "shard/tensor_access.h"

namespace fsdp::shard::deferred {

// Where operators come to while recording: below autograd, which does its work on tensors without
// memory as on any other, and above the backends. Only ever on for a thread, never on a tensor.
inline constexpr c10::DispatchKey kRecordKey = c10::DispatchKey::Fake;

// While alive, operators of this thread go straight to the backends.
struct BackendsOnly {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset |
                                           c10::DispatchKeySet({kKey, kRecordKey})};
};

using Memory = c10::intrusive_ptr<c10::StorageImpl>;

struct Geometry {  // all that makes a tensor of a storage
  at::ScalarType type;
  at::DimVector sizes, strides;
  int64_t offset;                    // in elements
  bool conjugated, negated, number;  // number: a C++ scalar, which counts less in type promotion
};
Geometry geometry_of(const at::Tensor& tensor);
bool same_layout(const at::Tensor& tensor, const Geometry& geometry);
at::Tensor view_of(const Memory& storage, const Geometry& geometry);

struct Operand {         // a tensor argument of a recorded operator
  at::Tensor real;       // a tensor with memory; undefined for a deferred or undefined one
  uint32_t version = 0;  // of `real` when it was read
  uint64_t storage = 0;  // of a deferred one; 0: none
  size_t bytes = 0;      // of the storage
  at::Device device = at::kCPU;
  Geometry geometry;
};

struct Output {  // a storage that a recorded operator makes
  uint64_t storage;
  size_t position;  // of the first tensor in it, among the tensors that the operator returns
  size_t bytes;
  Geometry geometry;
};

struct RandomState {  // a generator's state before a random operator
  at::Generator generator;
  at::Tensor state;
};

struct Record {
  uint64_t sequence;
  c10::OperatorHandle op;
  torch::jit::Stack arguments;  // tensors left undefined: they are `operands`, in order
  std::vector<Operand> operands;
  std::vector<Output> outputs;
  std::vector<RandomState> random;
  caffe2::TypeMeta default_dtype;  // what an argument that was left out stands for
  std::vector<std::shared_ptr<const Record>> needs;  // must run before

  explicit Record(const c10::OperatorHandle& op);
  ~Record();  // not recursive: a chain of records can be long
};

// A storage whose contents are on the tape until it is given memory.
class Storage final : public c10::StorageImpl {
 public:
  Storage(size_t bytes, at::Device device);

  const uint64_t id;
  std::shared_ptr<const Record> last;  // wrote here last; null: nothing did

  bool has_memory() const { return has_memory_; }
  void give(Memory memory);

 private:
  StorageTag tag_;
  Memory memory_;
  std::atomic<bool> has_memory_ = false;
};

Storage* storage_of(const at::Tensor& tensor);  // null unless deferred and still without memory

// The contents, in memory that nobody else knows. Throws fsdp::Error if a tensor from outside that
// the tape reads was changed meanwhile.
Memory contents(const Storage& storage);
// Memory of this size with anything in it.
Memory scratch(size_t bytes, at::Device device);
Memory memory_of(const at::Tensor& tensor);

// `value` with every tensor in it (also in lists) replaced by f(tensor), in order.
template <typename F>
c10::IValue map_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(f(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(f(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

}  // namespace fsdp::shard::deferred
