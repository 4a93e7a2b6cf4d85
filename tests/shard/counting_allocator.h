// Counts the bytes that LibTorch's CPU allocator has given out: what tensors really occupy.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>

namespace fsdp::testing {

// Counts what the CPU allocator gives out, from its construction on.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() { c10::SetCPUAllocator(this, /*priority=*/1); }

  c10::DataPtr allocate(size_t bytes) override {
    size_t now = live += bytes;
    peak = std::max<size_t>(peak, now);
    auto* block = new Block{this, plain_->allocate(bytes), bytes};
    return {block->data.get(), block, &release, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  std::atomic<size_t> live = 0, peak = 0;

 private:
  struct Block {
    CountingAllocator* owner;
    c10::DataPtr data;
    size_t bytes;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    block->owner->live -= block->bytes;
    delete block;
  }
  c10::Allocator* plain_ = c10::GetDefaultCPUAllocator();
};

inline CountingAllocator& counted() {
  static auto* allocator = new CountingAllocator;  // never goes: memory outlives any test
  return *allocator;
}

}  // namespace fsdp::testing
