// SavePool: the host memory that a model's saves pass through on their way from the device to the
// file. It consists of slots of one size, is kept from one save to the next, and never grows beyond
// its limit: a larger save goes through it piece by piece.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/mutex.h"

namespace fsdp::checkpoint {

class SavePool {
 public:
  static constexpr int64_t kSlot = 8 << 20;  // bytes

  // `limit` in bytes; at least one slot is allowed. Memory is allocated when it is needed.
  SavePool(int64_t limit, at::Device device);

  int64_t limit() const { return limit_; }
  bool has_room(int64_t bytes) const;  // for a save of this size, beside those under way
  // A save of this size will follow: the pool may grow by that much, up to its limit.
  void expect(int64_t bytes);
  // Allocates that much now, with pauses, so that the steps of a training run aren't held up; the
  // same on the device, in the cache of its allocator, if `device_bytes` are free there. Ends early
  // after stop_growing(), or if there is no more memory.
  void grow(int64_t device_bytes = 0);
  void stop_growing();

  // Bytes that copies on the device may take: of its free memory, and what its allocator still has
  // cached of earlier copies, unless others use it by now.
  int64_t room_on_device() const;
  void took_on_device(int64_t bytes);

  // A slot. Waits for one if the pool can't grow; null if `given_up` then is true.
  char* take(const std::function<bool()>& given_up);
  void give(char* slot);
  void wake();  // whoever waits in take() looks at `given_up`

 private:
  bool pause_after(std::chrono::steady_clock::time_point begun);  // false: stop growing
  void grow_on_device(int64_t bytes);
  bool add_area();  // false: no more memory, or as large as it may be
  int64_t slots_held() const FSDP_REQUIRES(mutex_);

  const int64_t limit_;
  const at::Device device_;
  std::atomic<int64_t> cached_on_device_ = 0;  // bytes: the most that copies took there
  mutable Mutex mutex_;
  Condition changed_;
  std::vector<at::Tensor> areas_ FSDP_GUARDED_BY(mutex_);  // several slots each
  std::vector<char*> free_ FSDP_GUARDED_BY(mutex_);
  int64_t slots_ FSDP_GUARDED_BY(mutex_) = 0;   // allocated, or being allocated
  int64_t wanted_ FSDP_GUARDED_BY(mutex_) = 0;  // slots
  bool stop_growing_ FSDP_GUARDED_BY(mutex_) = false;
};

// The limit unless another is set: half of the memory that the host has left, shared by its ranks.
int64_t default_pool(int ranks_on_host);

}  // namespace fsdp::checkpoint
