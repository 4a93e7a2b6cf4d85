// Meter: what a thread's tensors on the meta device would occupy. What its operators would compute
// is told to shard/dry_run.h.
//
// The meta device has an allocator like any other, which hands out nothing. Ours hands out nothing
// too, but is told when a storage dies, so that the bytes that live at any time are known exactly.
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
  int64_t peak() const;       // since begin()
  int64_t peak_held() const;  // likewise, with what a GPU's allocator cannot give back
  int64_t allocated() const;  // all that was asked for since begin()
  // A new count. `watch` is called at each allocation, before it counts: by then it is known whose
  // the one before was.
  void begin(std::function<void()> watch = {});

  struct State;

 private:
  std::shared_ptr<State> state_;
  uint64_t callback_ = 0;
};

}  // namespace fsdp::memory
