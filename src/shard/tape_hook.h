// The hook through which recomputation (src/memory) sees what LibTorch reports to this room: the
// operators of a recording thread, tensors that autograd saves, parameters that are used, and the
// beginning of a backward. It costs one branch until set_tape_hooks is called.
//
// A recording thread includes the key kRecordKey. The hook then sees operators below autograd,
// decomposed into what the backends run.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>

#include <memory>

#include "shard/thread_state.h"

namespace fsdp::shard {

// A saved tensor that isn't kept, because it can be computed or fetched again.
class SavedPlace {
 public:
  virtual ~SavedPlace() = default;
  virtual at::Tensor get() = 0;
};

// A thread's part of recomputation.
class TapeHook {
 public:
  virtual ~TapeHook() = default;
  // An operator of the user's code reads a parameter that carries the key.
  virtual void touched(c10::TensorImpl* parameter) = 0;
  virtual void operate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) = 0;
  // Null: the tensor must be kept.
  virtual std::unique_ptr<SavedPlace> pack(const at::Tensor& tensor) = 0;
  virtual void backward_begins() = 0;
};

// The process's part.
class TapeHooks {
 public:
  virtual ~TapeHooks() = default;
  virtual std::unique_ptr<TapeHook> for_thread() = 0;
  // Whether a hook needs to see every use of a parameter.
  virtual bool watches(const at::Tensor& parameter) const = 0;
};

TapeHooks* tape_hooks();                // null: nothing is recomputed
void set_tape_hooks(TapeHooks* hooks);  // must live for the rest of the process
TapeHook* tape_hook();                  // this thread's; null without tape_hooks()

// Whether this thread records. set_taping includes or excludes the key.
inline bool taping() {
  return this_thread().taping;
}
void set_taping(bool on);
bool shown();  // whether the hook sees this thread's operators: taping() without a ViewsOnly
// Whether the hook is asked about tensors that autograd saves in this thread: while it records, and
// while it only moves them elsewhere.
inline bool packing() {
  return this_thread().packing;
}

// While alive, the hook doesn't see this thread's operators. For views, which it would only
// recognise as views, at the cost of a recorded operator each.
class ViewsOnly {
 public:
  ViewsOnly();
  ~ViewsOnly();
  ViewsOnly(const ViewsOnly&) = delete;
  ViewsOnly& operator=(const ViewsOnly&) = delete;

 private:
  bool hides_;
};

// Tells whether a graph is wanted while grad mode is off: layers compute without it and then record
// their autograd nodes themselves (src/nn).
struct GraphWanted : ThreadScope<&ThreadState::graph_wanted> {
  GraphWanted() : ThreadScope(now()) {}
  static bool now() { return ThreadScope::now() || at::GradMode::is_enabled(); }
};

}  // namespace fsdp::shard
