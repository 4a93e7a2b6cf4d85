// The hook by which recomputation (src/memory) sees what LibTorch tells this room: operators of a
// thread that records, tensors that autograd saves, parameters that are touched, and the beginning
// of a backward. Nobody uses it until set_tape_hook is called; until then it costs one branch.
//
// A thread that records has the key kRecordKey included. Operators come by below autograd then,
// taken apart into what the backends run.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>

#include <memory>

namespace fsdp::shard {

// A saved tensor that is not kept: it can be had again.
class SavedPlace {
 public:
  virtual ~SavedPlace() = default;
  virtual at::Tensor get() = 0;
};

class TapeHook {
 public:
  virtual ~TapeHook() = default;
  // An operator of the user's reads a parameter that carries the key.
  virtual void touched(c10::TensorImpl* parameter) = 0;
  virtual void operate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) = 0;
  // Null: the tensor must be kept.
  virtual std::unique_ptr<SavedPlace> pack(const at::Tensor& tensor) = 0;
  virtual void backward_begins() = 0;
  // Whether uses of a parameter are wanted to be seen.
  virtual bool watches(const at::Tensor& parameter) const = 0;
};

TapeHook* tape_hook();               // null: nobody records, in any thread
void set_tape_hook(TapeHook* hook);  // lives for ever

// Whether this thread records. Includes the key, or takes it away.
bool taping();
void set_taping(bool on);

// Layers that compute without grad mode what they then record themselves (src/nn) say with this
// whether a graph is wanted.
class GraphWanted {
 public:
  GraphWanted() : before_(wanted_) { wanted_ = wanted_ || at::GradMode::is_enabled(); }
  ~GraphWanted() { wanted_ = before_; }
  GraphWanted(const GraphWanted&) = delete;
  GraphWanted& operator=(const GraphWanted&) = delete;

  static bool now() { return wanted_ || at::GradMode::is_enabled(); }

 private:
  static thread_local bool wanted_;
  bool before_;
};

}  // namespace fsdp::shard
