// Curve: a series of a run, made small enough to draw. Each column of pixels keeps the least, the
// greatest and the last value, so peaks stay visible however many steps a run has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::report {

struct Curve {
  std::vector<int64_t> x;         // the last step of each column
  std::vector<double> last;       // its last finite value; NaN if it has none
  std::vector<double> low, high;  // of its finite values; empty if no column has two steps
};

// `x` ascends; `y` has the same length. Values that aren't finite count as missing. Columns without
// any step are left out.
Curve downsample(std::span<const int64_t> x, std::span<const double> y, size_t columns);

// Of the steps `x`, at most one per column.
std::vector<int64_t> thinned(std::span<const int64_t> x, size_t columns);

}  // namespace fsdp::report
