// The memory of LibTorch's CUDA allocator, segment by segment, as it was when it ran out.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <vector>

namespace fsdp::comm {

// From the first call on, remembers the segments whenever an allocation fails. Unwinding frees
// memory, so what an exception's handler sees is no longer what was there.
void watch_memory();

// At the last failure, or now if there was none.
std::vector<c10::CachingDeviceAllocator::SegmentInfo> memory_segments();

}  // namespace fsdp::comm
