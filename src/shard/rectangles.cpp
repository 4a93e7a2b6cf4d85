#include "shard/rectangles.h"

#include <algorithm>

namespace fsdp::shard {
namespace {

// In memory order. The leading indices are `fixed`; [begin, end) is in the remaining dimensions.
void cover(const std::vector<int64_t>& sizes, std::vector<int64_t>& fixed, int64_t begin,
           int64_t end, std::vector<Rectangle>& out) {
  if (begin >= end) return;
  size_t dimension = fixed.size();
  auto emit = [&](int64_t first, int64_t count) {
    Rectangle rectangle{fixed, std::vector<int64_t>(fixed.size(), 1)};
    if (dimension < sizes.size()) {
      rectangle.offsets.push_back(first);
      rectangle.sizes.push_back(count);
    }
    for (size_t d = dimension + 1; d < sizes.size(); ++d) {
      rectangle.offsets.push_back(0);
      rectangle.sizes.push_back(sizes[d]);
    }
    out.push_back(std::move(rectangle));
  };
  if (dimension == sizes.size()) return emit(0, 1);
  int64_t row = 1;
  for (size_t d = dimension + 1; d < sizes.size(); ++d) row *= sizes[d];
  auto inside = [&](int64_t index, int64_t from, int64_t to) {  // a part of one row
    fixed.push_back(index);
    cover(sizes, fixed, from, to, out);
    fixed.pop_back();
  };
  int64_t first = begin / row, last = end / row;
  if (first == last) return inside(first, begin - first * row, end - first * row);
  if (begin % row != 0) {
    inside(first, begin - first * row, row);
    ++first;
  }
  if (last > first) emit(first, last - first);
  if (end % row != 0) inside(last, 0, end - last * row);
}

}  // namespace

std::vector<Rectangle> rectangles_of(const std::vector<int64_t>& sizes,
                                     const std::vector<int64_t>& order, int64_t begin,
                                     int64_t numel) {
  if (numel == 0) return {};
  std::vector<int64_t> in_memory, fixed;
  for (int64_t dimension : order) in_memory.push_back(sizes[dimension]);
  std::vector<Rectangle> found;
  cover(in_memory, fixed, begin, begin + numel, found);
  for (Rectangle& rectangle : found) {
    Rectangle turned{std::vector<int64_t>(order.size()), std::vector<int64_t>(order.size())};
    for (size_t i = 0; i < order.size(); ++i) {
      turned.offsets[order[i]] = rectangle.offsets[i];
      turned.sizes[order[i]] = rectangle.sizes[i];
    }
    rectangle = std::move(turned);
  }
  return found;
}

}  // namespace fsdp::shard
