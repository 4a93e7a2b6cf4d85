// Meter: counts the memory that a thread's tensors on the meta device would occupy. Reports the
// matrix products of its operators to shard/dry_run.h.
//
// The meta device's allocator hands out no memory. Neither does ours, but it learns when a storage
// is freed, so the live bytes are exact at any time. Autograd accumulates several gradients of one
// tensor in place, but not on the meta device; the sum is counted as if it reused the memory of the
// first. Logits are recognized by their use: the inputs and outputs of a cross-entropy.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace fsdp::memory {

struct MeterState;

class Meter {
 public:
  // `blocks`: rounds and places requests as a GPU's allocator does; else counts them as they are.
  // Counts this thread's allocations until it is destroyed; frees of those are counted even later.
  explicit Meter(bool blocks);
  ~Meter();
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  int64_t live() const;
  struct Logits {
    int64_t all = 0;    // live bytes
    int64_t saved = 0;  // of these, bytes that autograd keeps
  };
  Logits logits() const;
  int64_t peak() const;       // since begin()
  bool peak_in_loss() const;  // whether a loss over classes made the allocation at the peak
  int64_t peak_held() const;  // peak including what a GPU's allocator can't free
  int64_t allocated() const;  // sum of all requests since begin()
  // Starts a new count. `watch` is called at each allocation, before it is counted; by then the
  // owner of the previous allocation is known.
  void begin(std::function<void()> watch = {});

 private:
  std::shared_ptr<MeterState> state_;
  uint64_t callback_ = 0, nodes_ = 0;
};

}  // namespace fsdp::memory
