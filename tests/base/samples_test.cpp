#include "base/samples.h"

#include <gtest/gtest.h>

namespace fsdp {
namespace {

TEST(Samples, AMedianIsTheMiddleValueAndTheLargerOfTwo) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 3, 2}), 3);
  EXPECT_EQ(median({}), 0);
}

TEST(Samples, CallsBeforeTheRoundsDoNotCount) {
  double calls = 0;
  EXPECT_EQ(median_of(3, 2, [&] { return ++calls; }), 4);  // of 3, 4, 5
  EXPECT_EQ(calls, 5);
}

TEST(Samples, FillALineWithAMedianForEachName) {
  Samples samples;
  for (const double value : {1, 5, 2}) samples.add("ms", value);
  samples.add("us", 7);
  nlohmann::ordered_json line;
  samples.fill(line);
  EXPECT_EQ(line.dump(), R"({"ms":2.0,"us":7.0})");
  EXPECT_EQ(samples.median("missing"), 0);
}

}  // namespace
}  // namespace fsdp
