// The order of samples: a permutation for every n, the same on every machine, and without
// structure.
#include "data/order.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace fsdp::data {
namespace {

TEST(Order, IsAPermutationOfEveryLength) {
  std::vector<int64_t> lengths = {1000, 1023, 1024, 1025, 4095, 4096, 4097, 65537, 300007};
  for (int64_t n = 1; n <= 300; ++n) lengths.push_back(n);
  for (int64_t n : lengths) {
    std::vector<bool> seen(n);
    for (int64_t i = 0; i < n; ++i) {
      int64_t sample = shuffled(i, n, 42, 3);
      ASSERT_TRUE(sample >= 0 && sample < n) << n;
      ASSERT_FALSE(seen[sample]) << n;
      seen[sample] = true;
    }
  }
}

TEST(Order, IsTheSameOnEveryMachine) {
  // A run resumed on another machine or by a later version must get the same numbers.
  std::vector<int64_t> order;
  for (int64_t i = 0; i < 8; ++i) order.push_back(shuffled(i, 1000, 1, 0));
  EXPECT_EQ(order, (std::vector<int64_t>{306, 86, 847, 977, 374, 263, 354, 732}));
}

TEST(Order, DependsOnSeedAndEpoch) {
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (int64_t epoch = 0; epoch < 20; ++epoch) {
      std::vector<int64_t> order;
      for (int64_t i = 0; i < 50; ++i) order.push_back(shuffled(i, 50, seed, epoch));
      orders.insert(order);
    }
  }
  EXPECT_EQ(orders.size(), 400u);
}

TEST(Order, GoesToTheEndOfWhatCanBeCounted) {
  for (int64_t n : {(int64_t{1} << 40) + 7, INT64_MAX}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 1000; ++i) {
      int64_t sample = shuffled(n - 1 - i, n, 9, 1);
      ASSERT_TRUE(sample >= 0 && sample < n);
      seen.insert(sample);
    }
    EXPECT_EQ(seen.size(), 1000u);
  }
}

// Chi-square of how the first places of the order fall into 16 parts of the samples. With 15
// degrees of freedom it exceeds 50 once in 80,000 cases.
TEST(Order, SpreadsEachPartOfTheEpochOverAllSamples) {
  const int64_t n = 100'003;
  for (int64_t part = 0; part < 10; ++part) {
    std::vector<double> counts(16);
    for (int64_t i = 0; i < n / 10; ++i)
      counts[shuffled(part * (n / 10) + i, n, 5, part) * 16 / n] += 1;
    double expected = static_cast<double>(n / 10) / 16, chi = 0;
    for (double count : counts) chi += (count - expected) * (count - expected) / expected;
    EXPECT_LT(chi, 50) << part;
  }
}

TEST(Order, NeighboursAndDistancesAreThoseOfChance) {
  const int64_t n = 100'000;
  double distance = 0, steps = 0;
  int64_t followers = 0, fixed = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t here = shuffled(i, n, 17, 0), next = shuffled((i + 1) % n, n, 17, 0);
    distance += std::abs(static_cast<double>(here - i));
    steps += std::abs(static_cast<double>(next - here));
    followers += next == here + 1;
    fixed += here == i;
  }
  // The mean distance of two random places is n / 3, with a standard deviation of 0.24 n / sqrt(n).
  EXPECT_NEAR(distance / n / n, 1.0 / 3, 0.005);
  EXPECT_NEAR(steps / n / n, 1.0 / 3, 0.005);
  EXPECT_LT(followers, 10);  // one is expected
  EXPECT_LT(fixed, 10);
}

// All orders of three samples are about equally frequent over seeds and epochs.
TEST(Order, OfFewSamplesIsFairToo) {
  std::vector<double> counts(6);
  for (uint64_t seed = 0; seed < 6000; ++seed) {
    int64_t a = shuffled(0, 3, seed, 0), b = shuffled(1, 3, seed, 0);
    counts[a * 2 + (b > a ? b - 1 : b)] += 1;
  }
  double chi = 0;
  for (double count : counts) chi += (count - 1000) * (count - 1000) / 1000;
  EXPECT_LT(chi, 30);  // 5 degrees of freedom: once in 70,000 cases
}

}  // namespace
}  // namespace fsdp::data
