#include "checkpoint/cover.h"

#include <algorithm>

#include "base/format.h"
#include "checkpoint/overlap.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kMostComparisons = int64_t{1} << 24;  // under a second

bool share_elements(const Rectangle& a, const Rectangle& b) {
  for (size_t d = 0; d < a.offsets.size(); ++d)
    if (a.offsets[d] >= b.offsets[d] + b.sizes[d] || b.offsets[d] >= a.offsets[d] + a.sizes[d])
      return false;
  return true;
}

// The dimension in which the parts begin at the most places.
size_t most_cut_dimension(const std::vector<const Rectangle*>& parts, size_t dimensions) {
  size_t best = 0, most = 0;
  for (size_t d = 0; d < dimensions; ++d) {
    std::vector<int64_t> begins;
    for (const Rectangle* part : parts) begins.push_back(part->offsets[d]);
    std::sort(begins.begin(), begins.end());
    const auto places =
        static_cast<size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
    if (places > most) best = d, most = places;
  }
  return best;
}

struct Overlap {
  const Rectangle *one = nullptr, *other = nullptr;  // two parts that share elements; null: none do
  bool unknown = false;                              // it would take too long to tell
};

// Each part is compared only with those that start before it ends in one dimension; for the parts
// of a sharded tensor these are few.
Overlap overlapping(const TensorEntry& entry) {
  std::vector<const Rectangle*> parts;
  for (const auto& chunk : entry.chunks)
    if (element_count(chunk.rectangle.sizes) > 0) parts.push_back(&chunk.rectangle);
  if (entry.sizes.empty()) return parts.size() > 1 ? Overlap{parts[0], parts[1]} : Overlap{};
  const size_t d = most_cut_dimension(parts, entry.sizes.size());
  const auto begin = [&](const Rectangle* part) { return part->offsets[d]; };
  std::sort(parts.begin(), parts.end(),
            [&](const auto* a, const auto* b) { return begin(a) < begin(b); });
  int64_t left = kMostComparisons;
  for (size_t i = 0; i < parts.size(); ++i)
    for (size_t j = i + 1;
         j < parts.size() && begin(parts[j]) < begin(parts[i]) + parts[i]->sizes[d]; ++j) {
      if (share_elements(*parts[i], *parts[j])) return {parts[i], parts[j]};
      if (--left == 0) return {nullptr, nullptr, true};
    }
  return {};
}

std::string text_of(const Rectangle& rectangle) {
  return shape_text(rectangle.sizes) + " at " + shape_text(rectangle.offsets);
}

}  // namespace

std::string cover_problem(const TensorEntry& entry) {
  const Overlap overlap = overlapping(entry);
  if (overlap.one)
    return formatted("has overlapping parts: {} and {} of {}", text_of(*overlap.one),
                     text_of(*overlap.other), shape_text(entry.sizes));
  if (overlap.unknown)
    return formatted("has {} parts, cut in a way that takes too long to check",
                     entry.chunks.size());
  // Parts inside of the tensor that don't overlap have at most as many elements as the tensor.
  int64_t covered = 0;
  for (const auto& chunk : entry.chunks) covered += element_count(chunk.rectangle.sizes);
  const int64_t whole = element_count(entry.sizes);
  if (covered == whole) return "";
  return formatted("has parts that don't cover all of {}: they have {} of {} elements",
                   shape_text(entry.sizes), covered, whole);
}

}  // namespace fsdp::checkpoint
