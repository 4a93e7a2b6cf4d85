// Trials: what an operator would return, found out without keeping anything.
//
// An operator under recording is tried on stand-ins for its arguments: meta tensors, which tell
// shapes and aliases for free, or, where that cannot be, memory that goes right after. Random
// operators are tried for real, so that the generator goes on as it would have, unless nobody wants
// the values.
#pragma once

#include <string_view>
#include <unordered_map>
#include <vector>

#include "shard/deferred_tape.h"

namespace fsdp::shard::deferred {

struct Argument {  // a tensor among an operator's arguments
  at::Tensor tensor;
  Storage* deferred;  // null: has memory, or is undefined
  bool written;
  bool read;         // its contents, not just its shape
  bool overwritten;  // its whole storage, unread
};
bool is_real(const Argument& argument);

struct Call {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  torch::jit::Stack& stack;
  c10::ArrayRef<c10::IValue> values;  // the arguments on the stack
  std::vector<Argument> arguments;    // the tensors in `values`, in order

  bool any(bool (*is)(const Argument&)) const;
  bool writes_any() const;
};
Call call_of(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack);
std::string_view name_of(const c10::OperatorHandle& op);  // without "aten::"; others have none
at::Device device_of(const Call& call);                   // where new results are
bool is_plain(const at::Tensor& tensor);                  // nothing but a geometry over a storage

struct Trial {
  bool real = false;
  std::vector<RandomState> random;    // before it
  std::vector<at::Tensor> arguments;  // stand-ins, in order
  torch::jit::Stack returned;
  std::vector<at::Tensor> results;                            // the tensors in `returned`, in order
  std::unordered_map<c10::StorageImpl*, Memory> stand_ins;    // by what they stand for
  std::unordered_map<c10::StorageImpl*, Argument> originals;  // by their stand-in

  const Argument* original_of(const at::Tensor& tried) const;  // null: it is in a new storage
};
// Throws what the operator throws.
Trial try_out(const Call& call);

// While one is alive, what this thread records is wanted for its shapes alone: random operators are
// not drawn from, and the values of what they filled are not those of plain construction.
class ShapesOnly {
 public:
  ShapesOnly();
  ~ShapesOnly();
  ShapesOnly(const ShapesOnly&) = delete;
  ShapesOnly& operator=(const ShapesOnly&) = delete;
};

}  // namespace fsdp::shard::deferred
