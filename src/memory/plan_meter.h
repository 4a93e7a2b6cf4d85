// Meter: what a thread's tensors on the meta device would occupy. What its operators would compute
// is told to shard/dry_run.h.
//
// The meta device has an allocator like any other, which hands out nothing. Ours hands out nothing
// too, but is told when a storage dies, so that the bytes that live at any time are known exactly.
// Where several gradients of one tensor meet, autograd adds in place, but not on the meta device:
// there the sum is counted as if it lay where the first of them did.
// Logits are told by who reads them: what a cross-entropy takes and makes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace fsdp::memory {

class Meter {
 public:
  // `blocks`: requests are rounded and placed as on a GPU; else counted as they are. Counts for
  // this thread until it goes, and what it saw be allocated also later.
  explicit Meter(bool blocks);
  ~Meter();
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  int64_t live() const;
  struct Logits {
    int64_t all = 0;    // bytes that live
    int64_t saved = 0;  // of these, what autograd keeps
  };
  Logits logits() const;
  int64_t peak() const;       // since begin()
  bool peak_in_loss() const;  // whether what came last then was made by a loss over classes
  int64_t peak_held() const;  // likewise, with what a GPU's allocator cannot give back
  int64_t allocated() const;  // all that was asked for since begin()
  // A new count. `watch` is called at each allocation, before it counts: by then it is known whose
  // the one before was.
  void begin(std::function<void()> watch = {});

  struct State;

 private:
  std::shared_ptr<State> state_;
  uint64_t callback_ = 0, nodes_ = 0;
};

}  // namespace fsdp::memory
