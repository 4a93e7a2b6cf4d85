#include "observe/intervals.h"

#include <algorithm>

namespace fsdp::observe {

Intervals united(Intervals any) {
  std::sort(any.begin(), any.end());
  Intervals joined;
  for (const Interval& one : any) {
    if (one.first >= one.second) continue;
    if (!joined.empty() && one.first <= joined.back().second)
      joined.back().second = std::max(joined.back().second, one.second);
    else
      joined.push_back(one);
  }
  return joined;
}

Intervals without(const Intervals& from, const Intervals& removed) {
  Intervals left;
  size_t next = 0;
  for (auto [begin, end] : from) {
    while (next < removed.size() && removed[next].second <= begin) ++next;
    for (size_t i = next; i < removed.size() && removed[i].first < end; ++i) {
      if (removed[i].first > begin) left.emplace_back(begin, removed[i].first);
      begin = std::max(begin, removed[i].second);
    }
    if (begin < end) left.emplace_back(begin, end);
  }
  return left;
}

Intervals within(const Intervals& all, int64_t begin, int64_t end) {
  Intervals inside;
  for (const Interval& one : all) {
    const Interval cut(std::max(one.first, begin), std::min(one.second, end));
    if (cut.first < cut.second) inside.push_back(cut);
  }
  return inside;
}

int64_t length(const Intervals& disjoint) {
  int64_t sum = 0;
  for (const auto& [begin, end] : disjoint) sum += end - begin;
  return sum;
}

std::vector<int64_t> divided(const std::vector<Labelled>& all, size_t labels, int64_t begin,
                             int64_t end) {
  struct Edge {
    int64_t at;
    size_t label;
    int change;
  };
  std::vector<Edge> edges;
  for (const Labelled& one : all) {
    const int64_t from = std::clamp(one.begin, begin, end), to = std::clamp(one.end, begin, end);
    if (from >= to) continue;
    edges.push_back({from, one.label, 1});
    edges.push_back({to, one.label, -1});
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.at < b.at; });
  std::vector<int64_t> parts(labels + 1), open(labels + 1);
  int64_t at = begin;
  const auto pass = [&](int64_t until) {
    size_t first = 0;
    while (first < labels && open[first] == 0) ++first;
    parts[first] += until - at;
    at = until;
  };
  for (const Edge& edge : edges) {
    pass(edge.at);
    open[edge.label] += edge.change;
  }
  pass(end);
  return parts;
}

}  // namespace fsdp::observe
