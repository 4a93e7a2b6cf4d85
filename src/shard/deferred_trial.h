// Trials: find out what an operator would return, without keeping anything.
//
// An operator under recording is tried on stand-ins for its arguments: meta tensors, which give
// shapes and aliases for free, or, if that isn't possible, memory that is freed right after. The
// generator must advance as in plain construction. For the usual initialisers it is moved ahead
// (deferred_draw.h); other random operators run for real, unless only shapes are wanted.
#pragma once

#include <string_view>
#include <unordered_map>
#include <vector>

#include "shard/deferred_tape.h"
#include "shard/thread_state.h"

namespace fsdp::shard::deferred {

struct Argument {  // a tensor among an operator's arguments
  at::Tensor tensor;
  Storage* deferred;  // null: has memory, or is undefined
  bool written;
  bool read;         // its contents are read, not just its shape
  bool overwritten;  // its whole storage is, without being read
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
std::string_view name_of(const c10::OperatorHandle& op);  // without "aten::"; "" for others
at::Device device_of(const Call& call);                   // of new results
bool is_plain(const at::Tensor& tensor);                  // nothing but a geometry over a storage

struct Trial {
  bool real = false;
  std::vector<RandomState> random;    // states before the trial
  std::shared_ptr<const Draw> draw;   // the operator, if it is one; else null
  std::vector<at::Tensor> arguments;  // stand-ins, in order
  torch::jit::Stack returned;
  std::vector<at::Tensor> results;                            // the tensors in `returned`, in order
  std::unordered_map<c10::StorageImpl*, Memory> stand_ins;    // by the original storage
  std::unordered_map<c10::StorageImpl*, Argument> originals;  // by their stand-in

  const Argument* original_of(const at::Tensor& tried) const;  // null: it has a new storage
};
// Throws the operator's exception.
Trial try_out(const Call& call);

}  // namespace fsdp::shard::deferred
