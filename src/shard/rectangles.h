// Rectangles: a run of elements of a tensor, in memory order, as rectangles of its index space.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/shard_info.h"

namespace fsdp::shard {

// Elements [begin, begin + numel) of a tensor of `sizes` whose dimensions lie in memory in `order`
// (outermost first). One rectangle if the run is whole rows, else the fewest that cover it.
std::vector<Rectangle> rectangles_of(const std::vector<int64_t>& sizes,
                                     const std::vector<int64_t>& order, int64_t begin,
                                     int64_t numel);

}  // namespace fsdp::shard
