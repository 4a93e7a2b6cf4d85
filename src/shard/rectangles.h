// Rectangles: expresses a range of elements, in memory order, as rectangles of the index space.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/shard_info.h"

namespace fsdp::shard {

// Covers elements [begin, begin + numel) of a tensor of `sizes` whose dimensions are in memory in
// `order` (outermost first): one rectangle if the range is whole rows, else the fewest possible.
std::vector<Rectangle> rectangles_of(const std::vector<int64_t>& sizes,
                                     const std::vector<int64_t>& order, int64_t begin,
                                     int64_t numel);

}  // namespace fsdp::shard
