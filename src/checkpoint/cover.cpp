#include "checkpoint/cover.h"

#include <algorithm>

#include "base/format.h"
#include "checkpoint/overlap.h"

namespace fsdp::checkpoint {
namespace {

// Two parts that share elements; null if there are none. Each part is compared only with those that
// start before it ends in the first dimension; for parts that are rows these are few.
std::pair<const Rectangle*, const Rectangle*> overlapping(const TensorEntry& entry) {
  std::vector<const Rectangle*> parts;
  for (const auto& chunk : entry.chunks)
    if (element_count(chunk.rectangle.sizes) > 0) parts.push_back(&chunk.rectangle);
  if (entry.sizes.empty())
    return parts.size() > 1 ? std::pair(parts[0], parts[1])
                            : std::pair<const Rectangle*, const Rectangle*>();
  const auto first = [](const Rectangle* part) { return part->offsets[0]; };
  std::sort(parts.begin(), parts.end(),
            [&](const auto* a, const auto* b) { return first(a) < first(b); });
  for (size_t i = 0; i < parts.size(); ++i)
    for (size_t j = i + 1;
         j < parts.size() && first(parts[j]) < first(parts[i]) + parts[i]->sizes[0]; ++j)
      if (overlap_of(*parts[i], *parts[j])) return {parts[i], parts[j]};
  return {};
}

std::string text_of(const Rectangle& rectangle) {
  return shape_text(rectangle.sizes) + " at " + shape_text(rectangle.offsets);
}

}  // namespace

std::string cover_problem(const TensorEntry& entry) {
  if (const auto [one, other] = overlapping(entry); one)
    return formatted("has overlapping parts: {} and {} of {}", text_of(*one), text_of(*other),
                     shape_text(entry.sizes));
  // Parts inside of the tensor that don't overlap have at most as many elements as the tensor.
  int64_t covered = 0;
  for (const auto& chunk : entry.chunks) covered += element_count(chunk.rectangle.sizes);
  const int64_t whole = element_count(entry.sizes);
  if (covered == whole) return "";
  return formatted("has parts that don't cover all of {}: they have {} of {} elements",
                   shape_text(entry.sizes), covered, whole);
}

}  // namespace fsdp::checkpoint
