#include "observe/step_split.h"

#include <algorithm>
#include <numeric>

#include "observe/intervals.h"

namespace fsdp::observe {

const char* part_name(size_t part) {
  constexpr const char* kNames[kParts] = {"kernel",       "memcpy",        "memset", "runtime",
                                          "data loading", "CPU execution", "other"};
  return kNames[part];
}

std::array<int64_t, kParts> split(const std::vector<Span>& spans, int64_t begin, int64_t end) {
  std::vector<Labelled> labelled;
  for (const Span& span : spans)
    labelled.push_back({static_cast<size_t>(span.activity), span.begin, span.end});
  std::array<int64_t, kParts> parts{};
  const std::vector<int64_t> found = divided(labelled, kParts - 1, begin, end);
  std::copy(found.begin(), found.end(), parts.begin());
  return parts;
}

std::array<int64_t, kParts> shares(const std::array<int64_t, kParts>& parts) {
  constexpr int64_t kWhole = 10000;
  const int64_t total = std::accumulate(parts.begin(), parts.end(), int64_t{0});
  std::array<int64_t, kParts> found{};
  if (total == 0) return found;
  std::array<double, kParts> lost{};  // by rounding down
  int64_t missing = kWhole;
  for (size_t i = 0; i < kParts; ++i) {
    const double exact =
        static_cast<double>(parts[i]) * static_cast<double>(kWhole) / static_cast<double>(total);
    found[i] = static_cast<int64_t>(exact);
    lost[i] = exact - static_cast<double>(found[i]);
    missing -= found[i];
  }
  for (; missing > 0; --missing) {
    const auto most = std::max_element(lost.begin(), lost.end());
    ++found[most - lost.begin()];
    *most = -1;
  }
  return found;
}

}  // namespace fsdp::observe
