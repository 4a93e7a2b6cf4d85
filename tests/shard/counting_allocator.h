// Counts the bytes LibTorch's CPU allocator has handed out: the memory tensors really occupy.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <unordered_map>

namespace fsdp::testing {

// Counts from its construction on.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() { c10::SetCPUAllocator(this, /*priority=*/1); }

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(live + bytes <= limit,
                "CountingAllocator: can't allocate memory: you tried to "
                "allocate ",
                bytes, " bytes.");
    size_t now = live += bytes;
    peak = std::max<size_t>(peak, now);
    void* data = plain_->raw_allocate(bytes);
    if (data) {
      std::lock_guard lock(mutex_);
      sizes_[data] = bytes;
    }
    return {data, data, &release, at::kCPU};
  }
  // Some kernels (oneDNN's) allocate raw memory; the pointer is then its own context.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  std::atomic<size_t> live = 0, peak = 0;
  std::atomic<size_t> limit =
      std::numeric_limits<size_t>::max();  // beyond it, allocations fail as LibTorch's do

 private:
  static void release(void* data);

  c10::Allocator* plain_ = c10::GetDefaultCPUAllocator();
  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
};

inline CountingAllocator& counted() {
  static auto* allocator = new CountingAllocator;  // never destroyed: memory outlives any test
  return *allocator;
}

inline void CountingAllocator::release(void* data) {
  if (!data) return;
  CountingAllocator& own = counted();
  {
    std::lock_guard lock(own.mutex_);
    own.live -= own.sizes_[data];
    own.sizes_.erase(data);
  }
  own.plain_->raw_deallocate(data);
}

}  // namespace fsdp::testing
