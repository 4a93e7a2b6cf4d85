// The tape of deferred construction: the operators that made each tensor, and their replay.
//
// A storage without memory knows the last operator that wrote to it, and a record of an operator
// knows the records that must run before it. References only point back in time, so the tape has no
// cycles and records that no living tensor needs are freed. A storage's contents come from
// replaying the records it needs, in recorded order, with one buffer per storage, freed after its
// last use.
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

struct Draw;  // deferred_draw.h

// The key that catches operators while recording: below autograd, which works on tensors without
// memory as on any other, and above the backends. Included per thread, never set on a tensor.
inline constexpr c10::DispatchKey kRecordKey = c10::DispatchKey::Fake;

// While alive, operators of this thread go straight to the backends.
struct BackendsOnly {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset |
                                           c10::DispatchKeySet({kKey, kRecordKey})};
};

using Memory = c10::intrusive_ptr<c10::StorageImpl>;

struct Geometry {  // what makes a tensor out of a storage
  at::ScalarType type;
  at::DimVector sizes, strides;
  int64_t offset;                    // in elements
  bool conjugated, negated, number;  // number: a C++ scalar, with lower rank in type promotion
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

struct Output {  // a storage that a recorded operator creates
  uint64_t storage;
  size_t position;  // of its first tensor among the tensors the operator returns
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
  std::shared_ptr<const Draw> draw;  // what it does to its operand, if that is a Draw; else null
  caffe2::TypeMeta default_dtype;    // the meaning of an omitted dtype argument
  std::vector<std::shared_ptr<const Record>> needs;  // records that must run before

  explicit Record(const c10::OperatorHandle& op);
  ~Record();  // iterative: a chain of records can be long
};

// A storage whose contents are on the tape until it is given memory.
class Storage final : public c10::StorageImpl {
 public:
  Storage(size_t bytes, at::Device device);

  const uint64_t id;
  std::shared_ptr<const Record> last;  // the last write; null: none

  bool has_memory() const { return has_memory_; }
  void give(Memory memory);

 private:
  StorageTag tag_;
  Memory memory_;
  std::atomic<bool> has_memory_ = false;
};

Storage* storage_of(const at::Tensor& tensor);  // null unless deferred and still without memory

// The contents, in new memory. Throws fsdp::Error if a tensor from outside that the tape reads was
// changed since it was recorded.
Memory contents(const Storage& storage);
// Uninitialised memory.
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
