// Counter-based random numbers: Philox's published values, distributions against the exact ones,
// and the same bits in parts, with any number of threads, on every device and machine.
#include "kernels/random.h"

#include <cmath>

#include "fsdp/error.h"
#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

constexpr uint64_t kKey = 0x0123456789abcdef;
const Distribution kNormal = Distribution::normal(0, 1);
const Distribution kUniform = Distribution::uniform(0, 1);

at::Tensor drawn(int64_t count, const Distribution& distribution, uint64_t key = kKey,
                 int64_t first = 0, at::ScalarType type = at::kFloat,
                 at::Device device = at::kCPU) {
  auto out = torch::full({count}, 77, at::TensorOptions(device).dtype(type));
  fill_random_(out, distribution, key, first);
  return out;
}

// The largest difference between the share of values up to x and the distribution function at x.
template <typename Cdf>
double kolmogorov_distance(const at::Tensor& values, Cdf cdf) {
  const auto sorted = std::get<0>(values.to(at::kDouble).sort());
  const double* at = sorted.const_data_ptr<double>();
  const auto count = static_cast<double>(sorted.numel());
  double worst = 0;
  for (int64_t i = 0; i < sorted.numel(); ++i) {
    const double expected = cdf(at[i]), low = static_cast<double>(i) / count;
    worst = std::max({worst, expected - low, low + 1 / count - expected});
  }
  return worst;
}

double normal_cdf(double x) {
  return std::erfc(-x * M_SQRT1_2) / 2;
}

TEST(Random, PhiloxGivesItsPublishedNumbers) {  // Random123 1.14, kat_vectors
  const auto expect = [](random::Four counter, uint64_t key, random::Four expected) {
    const random::Four actual = random::philox(counter, key);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(actual.word[i], expected.word[i]) << i;
  };
  expect({{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  expect({{~0u, ~0u, ~0u, ~0u}}, ~0ull, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  expect({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822,
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

// The inverse of the distribution function, by bisection in float64.
TEST(Random, NormalNumbersInvertTheDistributionFunction) {
  const auto expect = [](uint32_t number) {
    const bool negative = number < 0x80000000u;
    const double share = ((negative ? number : ~number) + 0.5) * 0x1p-32;
    double low = 0, high = 7;
    for (int i = 0; i < 60; ++i) {
      const double middle = (low + high) / 2;
      (normal_cdf(-middle) > share ? low : high) = middle;
    }
    const double expected = negative ? -low : low;
    EXPECT_NEAR(random::normal(number) / expected, 1, 5e-7) << number;
  };
  for (uint64_t number = 0; number < 1ull << 32; number += 400'009)
    expect(static_cast<uint32_t>(number));
  for (uint32_t i = 0; i < 2000; ++i)  // both tails, and both sides of the middle
    for (uint32_t number : {i, ~i, 0x80000000u + i, 0x7fffffffu - i}) expect(number);
}

TEST(Random, ValuesAreDistributedAsAsked) {
  constexpr int64_t kCount = 4'000'000;
  const double bound = 1.95 / std::sqrt(static_cast<double>(kCount));  // p = 0.001
  const auto normal = drawn(kCount, Distribution::normal(0.5, 2)).to(at::kDouble);
  EXPECT_LT(kolmogorov_distance(normal, [](double x) { return normal_cdf((x - 0.5) / 2); }), bound);
  const auto standard = (normal - 0.5) / 2;
  EXPECT_NEAR(standard.mean().item<double>(), 0, 4 / std::sqrt(kCount));
  EXPECT_NEAR(standard.square().mean().item<double>(), 1, 4 * std::sqrt(2.0 / kCount));
  EXPECT_NEAR(standard.pow(3).mean().item<double>(), 0, 4 * std::sqrt(15.0 / kCount));
  EXPECT_NEAR(standard.pow(4).mean().item<double>(), 3, 4 * std::sqrt(96.0 / kCount));
  const double beyond = (standard.abs() > 4).to(at::kDouble).sum().item<double>();
  EXPECT_NEAR(beyond, 2 * normal_cdf(-4) * kCount, 4 * std::sqrt(2 * normal_cdf(-4) * kCount));

  const auto uniform = drawn(kCount, Distribution::uniform(-1, 3));
  EXPECT_LT(kolmogorov_distance(uniform, [](double x) { return (x + 1) / 4; }), bound);
  EXPECT_GE(uniform.min().item<double>(), -1);
  EXPECT_LE(uniform.max().item<double>(), 3);
  EXPECT_TRUE(same_bits(drawn(9, Distribution::constant(0.25)), torch::full({9}, 0.25f)));
}

TEST(Random, NeighboursAndSequencesAreIndependent) {
  constexpr int64_t kCount = 1'000'000;
  const auto one = drawn(kCount, kNormal, 1), other = drawn(kCount, kNormal, 2);
  const double bound = 4 / std::sqrt(kCount);
  const auto correlation = [&](const at::Tensor& a, const at::Tensor& b) {
    return (a * b).to(at::kDouble).mean().item<double>();
  };
  EXPECT_NEAR(correlation(one, other), 0, bound);
  for (int64_t lag : {1, 2, 3, 4, 1024})
    EXPECT_NEAR(correlation(one.slice(0, lag), one.slice(0, 0, kCount - lag)), 0, bound) << lag;
}

// Made on aarch64 with g++ 12. A machine or a compiler that rounds differently fails here.
TEST(Random, BitsAreTheSameOnEveryMachine) {
  const auto sum = [](const at::Tensor& values) {
    return values.view(at::kInt).to(at::kLong).sum().item<int64_t>();
  };
  EXPECT_EQ(sum(drawn(100'000, kNormal)), -1'604'882'187'259);
  EXPECT_EQ(sum(drawn(100'000, Distribution::uniform(-0.3, 0.7))), 40'133'491'350'192);
}

TEST(Random, IndicesBeyond32BitsGiveOtherNumbers) {
  const int64_t far = int64_t{1} << 34;  // block 2^32
  EXPECT_FALSE(at::equal(drawn(8, kNormal, kKey, far), drawn(8, kNormal)));
  EXPECT_TRUE(at::equal(drawn(8, kNormal, kKey, far - 4).slice(0, 4),
                        drawn(8, kNormal, kKey, far).slice(0, 0, 4)));
}

TEST(Random, WhatCantBeFilledIsRefused) {
  EXPECT_THROW(fill_random_(at::zeros({4}, at::kInt), kNormal, 0, 0), Error);
  EXPECT_THROW(fill_random_(at::zeros({4, 4}).t().slice(0, 0, 2), kNormal, 0, 0), Error);
  EXPECT_THROW(fill_random_(at::zeros({4}), kNormal, 0, -1), Error);
}

class RandomOnDevice : public OnDevice {};
FSDP_ON_EVERY_DEVICE(RandomOnDevice);

TEST_P(RandomOnDevice, ValuesHaveTheBitsOfTheCpu) {
  for (auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    for (const Distribution& distribution : {Distribution::normal(0.1, 0.02), kUniform}) {
      const auto floats = drawn(300'001, distribution);
      EXPECT_TRUE(
          same_bits(drawn(300'001, distribution, kKey, 0, type, device()), floats.to(type)));
    }
}

TEST_P(RandomOnDevice, AnyPartHasTheBitsOfTheWhole) {
  constexpr int64_t kCount = 20'000;
  for (auto type : {at::kFloat, at::kBFloat16})
    for (const Distribution& distribution : {kNormal, kUniform}) {
      const auto whole = drawn(kCount, distribution, kKey, 0, type, device());
      auto parts = torch::full_like(whole, 99);
      int64_t first = 0;
      for (int64_t length = 1; first < kCount; length = length * 2 + 1) {
        const int64_t count = std::min(length, kCount - first);
        fill_random_(parts.narrow(0, first, count), distribution, kKey, first);
        first += count;
      }
      EXPECT_TRUE(same_bits(parts, whole));
    }
}

TEST_P(RandomOnDevice, NothingAroundAPartIsWritten) {
  for (auto type : kDtypes)
    for (int64_t first : {0, 1, 5, 8})
      for (int64_t begin : {0, 1, 4}) {
        auto memory = torch::full({64}, 7, at::TensorOptions(device()).dtype(type));
        fill_random_(memory.narrow(0, begin, 21), kUniform, kKey, first);
        EXPECT_TRUE(memory.slice(0, 0, begin).eq(7).all().item<bool>());
        EXPECT_TRUE(memory.slice(0, begin + 21).eq(7).all().item<bool>());
        EXPECT_TRUE(same_bits(memory.narrow(0, begin, 21), drawn(21, kUniform, kKey, first, type)));
      }
}

TEST_P(RandomOnDevice, ThreadsChangeNoBit) {
  expect_same_bits_always([&] {
    return std::vector{drawn(100'003, kNormal, kKey, 3, at::kFloat, device()),
                       drawn(100'003, kUniform, kKey, 3, at::kBFloat16, device())};
  });
}

}  // namespace
}  // namespace fsdp::kernels
