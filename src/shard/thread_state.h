// ThreadState: what a thread is doing, as far as that decides how its operators are treated. The
// functions that LibTorch calls (touch.cpp, deferred.cpp) read it; guards change it for a scope.
//
//   field         changed by            the thread's operators …
//   deferring     DeferredScope         go on the tape of deferred_init, which nothing else sees
//   shapes_only   DeferredOptions       … where random ones draw nothing
//   inside        the fallback          are part of an operator that was seen
//   taping        regions (src/memory)  are recorded, to be recomputed in backward
//   packing       regions (src/memory)  save places instead of tensors, where regions have one
//   graph_wanted  GraphWanted           get nodes in autograd's graph although grad mode is off
//   in_graph      InGraph               become part of a CUDA graph
//   records_step  RecordsStep           belong to a step that becomes one or more CUDA graphs
//   dry_run       dry_run::Scope        run on the meta device, without values
//
// Any of these may meet, with three exceptions, which debug builds check at every change:
//   1. in_graph, records_step and deferring: what a graph uses must have memory.
//   2. in_graph, records_step and dry_run: there is no device whose work could be recorded.
//   3. The key deferred::kRecordKey is included exactly while the thread defers or tapes.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp::memory {
struct MeterState;
}

namespace fsdp::shard {

class TapeHook;

// A matrix product, convolution or attention: these take most of a step's time.
struct Product {
  double flops;
  double bytes;  // read and written
  double speed = 1;  // how many times as fast as with operands of the parameters' dtype
};

struct DryRunState {
  enum class As { kNone, kCpu, kGpu };  // the device to imitate
  As as = As::kNone;
  std::vector<Product> products;
  struct Offloaded {
    int64_t now = 0, most = 0;  // bytes of activations in host memory
    int64_t moved = 0;          // sum of all bytes copied to the host
  } offloaded;
  std::shared_ptr<memory::MeterState> meter;  // counts allocations; null: nothing does
};

struct ThreadState {
  int deferring = 0;  // nested scopes
  int inside = 0;     // likewise, operators
  bool shapes_only = false;
  bool taping = false;
  bool packing = false;
  bool graph_wanted = false;
  bool in_graph = false;
  bool records_step = false;
  DryRunState dry_run;
  std::unique_ptr<TapeHook> tape;  // the thread's regions; null: it has none. Destroyed first.

  ThreadState();
  ~ThreadState();
};

ThreadState& this_thread();

// Throws std::logic_error for a combination that can't be.
void check(const ThreadState& state);
inline void check_in_debug() {
#ifndef NDEBUG
  check(this_thread());
#endif
}

// Gives a field of this thread's state another value for a scope.
template <auto Field>
class ThreadScope {
 public:
  using Value = std::remove_reference_t<decltype(std::declval<ThreadState&>().*Field)>;

  explicit ThreadScope(Value value) : before_(std::exchange(this_thread().*Field, value)) {
    check_in_debug();
  }
  ~ThreadScope() { this_thread().*Field = before_; }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

  static Value now() { return this_thread().*Field; }

 private:
  const Value before_;
};

// While alive, the work this thread puts on the device is recorded as a CUDA graph (capture.cpp).
// Random operators then draw new numbers in each replay, and can't be made to repeat them.
struct InGraph : ThreadScope<&ThreadState::in_graph> {
  InGraph() : ThreadScope(true) {}
};

}  // namespace fsdp::shard
