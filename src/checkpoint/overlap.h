// Operations on rectangles of one tensor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/shard_info.h"

namespace fsdp::checkpoint {

// The intersection of two rectangles; nullopt if it is empty.
inline std::optional<Rectangle> overlap_of(const Rectangle& a, const Rectangle& b) {
  Rectangle both;
  for (size_t d = 0; d < a.offsets.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    both.offsets.push_back(begin);
    both.sizes.push_back(end - begin);
  }
  return both;
}

// The number of elements. The sizes must have been checked: their product must not overflow.
inline int64_t element_count(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

// A sum that saturates instead of overflowing.
inline int64_t capped_sum(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

inline int64_t capped_product(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

inline Rectangle everything(const std::vector<int64_t>& sizes) {
  return {std::vector<int64_t>(sizes.size(), 0), sizes};
}

}  // namespace fsdp::checkpoint
