// The validation split: every sample is in one set, all regions of the data are represented, and
// the rule never changes unnoticed.
#include "data/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <vector>

#include "data/folders.h"

namespace fsdp::data {
namespace {

using test::contains;
using test::error_of;

std::vector<int64_t> numbers(const SampleSet& set) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < set.size(); ++i) all.push_back(set[i]);
  return all;
}

TEST(Split, PutsEverySampleInOneSet) {
  for (int64_t samples : {2, 3, 10, 63, 64, 65, 1000, 4099})
    for (double share : {1e-9, 0.01, 0.02, 0.1, 0.33, 0.5, 0.9}) {
      Split split = split_samples(samples, share);
      auto training = numbers(split.training), validation = numbers(split.validation);
      EXPECT_TRUE(std::is_sorted(training.begin(), training.end()));
      EXPECT_TRUE(std::is_sorted(validation.begin(), validation.end()));
      std::vector<int64_t> all;
      std::merge(training.begin(), training.end(), validation.begin(), validation.end(),
                 std::back_inserter(all));
      ASSERT_EQ(static_cast<int64_t>(all.size()), samples);
      for (int64_t i = 0; i < samples; ++i) ASSERT_EQ(all[i], i) << samples << " " << share;
      EXPECT_GE(split.validation.size(), 1);
      EXPECT_GE(split.training.size(), 1);
      if (share > 0.5) continue;
      EXPECT_NEAR(static_cast<double>(split.validation.size()),
                  std::max(1.0, share * static_cast<double>(samples)), 0.51)
          << samples << " " << share;
    }
}

TEST(Split, HoldsOutAStretchOfEveryPartOfTheData) {
  const int64_t samples = 64'000, held = 1280;  // 2 %: 20 of every thousand
  auto validation = numbers(split_samples(samples, 0.02).validation);
  ASSERT_EQ(static_cast<int64_t>(validation.size()), held);
  std::set<int64_t> places;
  for (int64_t part = 0; part < 64; ++part) {
    int64_t first = validation[part * 20];
    EXPECT_EQ(first / 1000, part);
    EXPECT_EQ(validation[part * 20 + 19], first + 19) << "consecutive";
    places.insert(first % 1000);
  }
  EXPECT_GT(places.size(), 50u) << "at other places in every part";
}

TEST(Split, WorksForHugeData) {
  const int64_t samples = int64_t{1} << 60;
  Split split = split_samples(samples, 0.25);
  EXPECT_EQ(split.validation.size(), samples / 4);
  EXPECT_EQ(split.training.size(), samples - samples / 4);
  EXPECT_LT(split.validation[samples / 4 - 1], samples);
  EXPECT_GT(split.validation[samples / 4 - 1], samples / 64 * 63);
}

// Checkpoints name the rule: whoever changes these numbers changes kSplitRule, too.
TEST(Split, IsTheSameAsEver) {
  EXPECT_EQ(std::string(kSplitRule), "stretches-64");
  EXPECT_EQ(numbers(split_samples(100, 0.05).validation),
            (std::vector<int64_t>{15, 25, 50, 73, 98}));
}

TEST(Split, ImpossibleOnesAreRefused) {
  EXPECT_EQ(split_samples(1, 0).training.size(), 1);
  EXPECT_EQ(split_samples(1, 0).validation.size(), 0);
  EXPECT_TRUE(contains(error_of([] { split_samples(1, 0.5); }), "1 samples, too few"));
  for (double share : {-0.1, 1.0, std::nan("")})
    EXPECT_TRUE(contains(error_of([&] { split_samples(100, share); }), "can't be held out"));
}

TEST(HeldOut, IsEveryNthDocument) {
  std::vector<int64_t> held;
  for (int64_t i = 0; i < 40; ++i)
    if (is_held_out(i, 0.1)) held.push_back(i);
  EXPECT_EQ(held, (std::vector<int64_t>{4, 14, 24, 34}));
  int64_t count = 0;
  for (int64_t i = 0; i < 10'000; ++i) count += is_held_out(i, 0.037);
  EXPECT_EQ(count, 370);
  EXPECT_FALSE(is_held_out(0, 0));
}

}  // namespace
}  // namespace fsdp::data
