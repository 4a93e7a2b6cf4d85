#include "report/curve.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fsdp::report {
namespace {

constexpr double kNoValue = std::numeric_limits<double>::quiet_NaN();

// The column of step `x`, of `columns` between `first` and `last`.
size_t column_of(int64_t x, int64_t first, int64_t last, size_t columns) {
  const double share = static_cast<double>(x - first) / (static_cast<double>(last - first) + 1);
  return static_cast<size_t>(share * static_cast<double>(columns));
}

}  // namespace

Curve downsample(std::span<const int64_t> x, std::span<const double> y, size_t columns) {
  Curve curve;
  if (x.empty() || columns == 0) return curve;
  const bool whole = x.size() <= columns;
  for (size_t i = 0; i < x.size();) {
    size_t end = i + 1;
    if (!whole) {
      const size_t column = column_of(x[i], x.front(), x.back(), columns);
      while (end < x.size() && column_of(x[end], x.front(), x.back(), columns) == column) ++end;
    }
    double low = kNoValue, high = kNoValue, last = kNoValue;
    for (; i < end; ++i) {
      if (!std::isfinite(y[i])) continue;
      last = y[i];
      low = std::isnan(low) ? last : std::min(low, last);
      high = std::isnan(high) ? last : std::max(high, last);
    }
    curve.x.push_back(x[end - 1]);
    curve.last.push_back(last);
    if (whole) continue;
    curve.low.push_back(low);
    curve.high.push_back(high);
  }
  return curve;
}

std::vector<int64_t> thinned(std::span<const int64_t> x, size_t columns) {
  std::vector<int64_t> kept;
  for (int64_t step : x) {
    const bool same = !kept.empty() && column_of(step, x.front(), x.back(), columns) ==
                                           column_of(kept.back(), x.front(), x.back(), columns);
    if (!same) kept.push_back(step);
  }
  return kept;
}

}  // namespace fsdp::report
