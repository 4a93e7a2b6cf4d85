#include "observe/step_split.h"

#include <algorithm>
#include <numeric>

namespace fsdp::observe {

const char* part_name(size_t part) {
  constexpr const char* kNames[kParts] = {"kernel",       "memcpy",        "memset", "runtime",
                                          "data loading", "CPU execution", "other"};
  return kNames[part];
}

std::array<int64_t, kParts> split(const std::vector<Span>& spans, int64_t begin, int64_t end) {
  struct Edge {
    int64_t at;
    size_t activity;
    int change;
  };
  std::vector<Edge> edges;
  for (const Span& span : spans) {
    int64_t from = std::clamp(span.begin, begin, end), to = std::clamp(span.end, begin, end);
    if (from == to) continue;
    edges.push_back({from, static_cast<size_t>(span.activity), 1});
    edges.push_back({to, static_cast<size_t>(span.activity), -1});
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.at < b.at; });
  std::array<int64_t, kParts> parts{}, open{};
  int64_t at = begin;
  const auto pass = [&](int64_t until) {
    size_t first = 0;
    while (first + 1 < kParts && open[first] == 0) ++first;
    parts[first] += until - at;
    at = until;
  };
  for (const Edge& edge : edges) {
    pass(edge.at);
    open[edge.activity] += edge.change;
  }
  pass(end);
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
