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
bool shown();  // whether the hook is shown operators: it records, and no ViewsOnly is alive
// Whether the hook is asked about tensors that autograd saves in this thread: where it records, and
// where it only moves them elsewhere.
bool packing();
void set_packing(bool on);

// While alive, what this thread puts on the device is recorded as a graph (capture.cpp). Random
// operators draw other numbers in each replay then, and cannot be made to draw the same twice.
class InGraph {
 public:
  InGraph() : before_(is_) { is_ = true; }
  ~InGraph() { is_ = before_; }
  InGraph(const InGraph&) = delete;
  InGraph& operator=(const InGraph&) = delete;

  static bool now() { return is_; }

 private:
  static thread_local bool is_;
  bool before_;
};

// While alive, operators of this thread are not shown to the hook. For views, of which it would
// only hear that they are views: each costs as much as a recorded operator otherwise.
class ViewsOnly {
 public:
  ViewsOnly();
  ~ViewsOnly();
  ViewsOnly(const ViewsOnly&) = delete;
  ViewsOnly& operator=(const ViewsOnly&) = delete;

 private:
  bool hides_;
};

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
