#include "observe/step_split.h"

#include <gtest/gtest.h>

#include <numeric>

namespace fsdp::observe {
namespace {

using Parts = std::array<int64_t, kParts>;

TEST(StepSplit, EveryInstantCountsForTheFirstActivity) {
  const std::vector<Span> spans = {{Activity::kCpu, 0, 50},      {Activity::kKernel, 10, 20},
                                   {Activity::kKernel, 15, 30},  {Activity::kMemcpy, 25, 40},
                                   {Activity::kRuntime, 45, 60}, {Activity::kLoading, 70, 80}};
  EXPECT_EQ(split(spans, 0, 100), (Parts{20, 10, 0, 15, 10, 15, 30}));
}

TEST(StepSplit, SpansAreClippedToTheStep) {
  const std::vector<Span> spans = {{Activity::kKernel, -10, 10}, {Activity::kMemset, 90, 200}};
  EXPECT_EQ(split(spans, 5, 100), (Parts{5, 0, 10, 0, 0, 0, 80}));
  EXPECT_EQ(split({}, 5, 100), (Parts{0, 0, 0, 0, 0, 0, 95}));
}

TEST(StepSplit, SharesAddUpToTheWhole) {
  EXPECT_EQ(shares({1, 1, 1, 0, 0, 0, 0}), (Parts{3334, 3333, 3333, 0, 0, 0, 0}));
  EXPECT_EQ(shares({}), Parts{});
  const Parts found = shares({7, 1, 13, 29, 3, 101, 11});
  EXPECT_EQ(std::accumulate(found.begin(), found.end(), int64_t{0}), 10000);
}

}  // namespace
}  // namespace fsdp::observe
