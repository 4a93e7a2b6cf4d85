// Downsampling: what is drawn of a curve is what its eye would see.
#include "report/curve.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

namespace fsdp::report {
namespace {

std::vector<int64_t> steps_to(int64_t last) {
  std::vector<int64_t> steps(static_cast<size_t>(last));
  std::iota(steps.begin(), steps.end(), 1);
  return steps;
}

TEST(Curve, AShortSeriesStaysAsItIs) {
  const std::vector<int64_t> x = {1, 2, 5};
  const Curve curve = downsample(x, std::vector<double>{3, 1, 2}, 10);
  EXPECT_EQ(curve.x, x);
  EXPECT_EQ(curve.last, (std::vector<double>{3, 1, 2}));
  EXPECT_TRUE(curve.low.empty());
}

TEST(Curve, KeepsEveryPeakAndTheLastValue) {
  const std::vector<int64_t> x = steps_to(100'000);
  std::vector<double> y(x.size(), 1.0);
  y[12'345] = 50;  // one step among a hundred thousand
  y[77'777] = -3;
  y.back() = 7;
  const Curve curve = downsample(x, y, 500);
  EXPECT_EQ(curve.x.size(), 500u);
  EXPECT_EQ(curve.low.size(), 500u);
  EXPECT_EQ(*std::max_element(curve.high.begin(), curve.high.end()), 50);
  EXPECT_EQ(*std::min_element(curve.low.begin(), curve.low.end()), -3);
  EXPECT_EQ(curve.last.back(), 7);
  EXPECT_EQ(curve.x.back(), 100'000);
  for (size_t i = 0; i < curve.x.size(); ++i) {
    EXPECT_LE(curve.low[i], curve.last[i]);
    EXPECT_GE(curve.high[i], curve.last[i]);
  }
}

TEST(Curve, ValuesThatAreNotFiniteAreMissing) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  const std::vector<int64_t> x = steps_to(8);
  const Curve curve = downsample(x, std::vector<double>{1, nan, inf, 4, nan, nan, 7, -inf}, 4);
  ASSERT_EQ(curve.x.size(), 4u);
  EXPECT_EQ(curve.last[0], 1);
  EXPECT_EQ(curve.last[1], 4);
  EXPECT_TRUE(std::isnan(curve.last[2]));
  EXPECT_EQ(curve.high[3], 7);
}

TEST(Curve, AGapInTheStepsLeavesNoColumn) {
  const std::vector<int64_t> x = {1, 2, 3, 1000};
  const Curve curve = downsample(x, std::vector<double>{1, 2, 3, 4}, 3);
  EXPECT_EQ(curve.x, (std::vector<int64_t>{3, 1000}));
}

TEST(Curve, ThinnedStepsAreOnePerColumn) {
  const std::vector<int64_t> x = steps_to(1000);
  EXPECT_EQ(thinned(x, 10).size(), 10u);
  EXPECT_TRUE(thinned({}, 10).empty());
}

}  // namespace
}  // namespace fsdp::report
