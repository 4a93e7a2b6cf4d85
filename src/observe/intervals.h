// Intervals of time, as sorted lists of disjoint pairs, and how to divide a time among activities
// that overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fsdp::observe {

using Interval = std::pair<int64_t, int64_t>;  // [first, second)
using Intervals = std::vector<Interval>;       // sorted and disjoint, where it is a result

Intervals united(Intervals any);  // sorts them and joins those that touch
Intervals without(const Intervals& from, const Intervals& removed);
Intervals within(const Intervals& all, int64_t begin, int64_t end);
int64_t length(const Intervals& disjoint);

struct Labelled {
  size_t label;
  int64_t begin, end;
};

// The time of [begin, end) for each of `labels`, and for none of them in the last place. Where
// several overlap, the least label counts. The parts add up to the whole.
std::vector<int64_t> divided(const std::vector<Labelled>& all, size_t labels, int64_t begin,
                             int64_t end);

}  // namespace fsdp::observe
