#include "comm/nccl/memory_segments.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include "base/mutex.h"

namespace fsdp::comm {
namespace {

using Segments = std::vector<c10::CachingDeviceAllocator::SegmentInfo>;

struct AtFailure {
  Mutex mutex;
  Segments segments FSDP_GUARDED_BY(mutex);
};

AtFailure& at_failure() {
  static AtFailure state;
  return state;
}

Segments segments_now() {
  return c10::cuda::CUDACachingAllocator::snapshot({0, 0}, /*include_traces=*/false).segments;
}

// LibTorch calls it without the allocator's lock, before it throws.
void remember(int64_t, size_t, size_t, size_t) {
  Segments segments = segments_now();
  AtFailure& state = at_failure();
  const Lock lock(state.mutex);
  state.segments = std::move(segments);
}

}  // namespace

void watch_memory() {
  static const bool attached = [] {
    c10::cuda::CUDACachingAllocator::attachOutOfMemoryObserver(remember);
    return true;
  }();
  static_cast<void>(attached);
}

Segments memory_segments() {
  AtFailure& state = at_failure();
  {
    const Lock lock(state.mutex);
    if (!state.segments.empty()) return state.segments;
  }
  return segments_now();
}

}  // namespace fsdp::comm
