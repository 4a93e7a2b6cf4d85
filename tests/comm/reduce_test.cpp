#include "comm/core/reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

template <typename T>
std::vector<std::vector<T>> random_sources(int sources, int count) {
  std::mt19937 generator(7);
  std::uniform_real_distribution<float> value(-3, 3);
  std::vector<std::vector<T>> all(sources, std::vector<T>(count));
  for (auto& source : all)
    for (auto& element : source) element = static_cast<T>(value(generator));
  return all;
}

template <typename T>
std::vector<const void*> pointers(const std::vector<std::vector<T>>& sources) {
  std::vector<const void*> all;
  for (const auto& source : sources) all.push_back(source.data());
  return all;
}

template <typename T>
void expect_fp32_sum_rounded_once(c10::ScalarType type) {
  auto sources = random_sources<T>(5, 3001);
  std::vector<T> out(3001);
  reduce(out.data(), pointers(sources), 3001, type, ReduceOp::SUM);
  for (int i = 0; i < 3001; ++i) {
    float sum = static_cast<float>(sources[0][i]);
    for (int s = 1; s < 5; ++s) sum += static_cast<float>(sources[s][i]);
    ASSERT_EQ(static_cast<float>(out[i]), static_cast<float>(static_cast<T>(sum))) << i;
  }
}

TEST(Reduce, SixteenBitFloatsAreSummedInFp32AndRoundedOnce) {
  expect_fp32_sum_rounded_once<c10::BFloat16>(c10::ScalarType::BFloat16);
  expect_fp32_sum_rounded_once<c10::Half>(c10::ScalarType::Half);
}

TEST(Reduce, SumsInTheOrderOfTheSources) {
  // (1e8 + -1e8) + 1 is 1, 1e8 + (-1e8 + 1) is 0 in fp32.
  float a = 1e8f, b = -1e8f, c = 1.0f, out = 0;
  const void* in_order[] = {&a, &b, &c};
  const void* other[] = {&b, &c, &a};
  reduce(&out, in_order, 1, c10::ScalarType::Float, ReduceOp::SUM);
  EXPECT_EQ(out, 1.0f);
  reduce(&out, other, 1, c10::ScalarType::Float, ReduceOp::SUM);
  EXPECT_EQ(out, 0.0f);
}

TEST(Reduce, OutputMayBeAnySource) {
  for (int alias = 0; alias < 3; ++alias) {
    auto sources = random_sources<double>(3, 2500);
    auto expected = sources[0];
    for (int i = 0; i < 2500; ++i) expected[i] = sources[0][i] + sources[1][i] + sources[2][i];
    reduce(sources[alias].data(), pointers(sources), 2500, c10::ScalarType::Double, ReduceOp::SUM);
    EXPECT_EQ(sources[alias], expected) << alias;
  }
}

TEST(Reduce, AverageMaximumMinimumProduct) {
  std::vector<std::vector<int32_t>> sources = {{5, -7}, {2, 9}, {-1, 4}};
  auto from = pointers(sources);
  std::vector<int32_t> out(2);
  auto run = [&](ReduceOp op) {
    reduce(out.data(), from, 2, c10::ScalarType::Int, op);
    return out;
  };
  EXPECT_EQ(run(ReduceOp::SUM), (std::vector<int32_t>{6, 6}));
  EXPECT_EQ(run(ReduceOp::AVG), (std::vector<int32_t>{2, 2}));
  EXPECT_EQ(run(ReduceOp::MAX), (std::vector<int32_t>{5, 9}));
  EXPECT_EQ(run(ReduceOp::MIN), (std::vector<int32_t>{-1, -7}));
  EXPECT_EQ(run(ReduceOp::PRODUCT), (std::vector<int32_t>{-10, -252}));
}

TEST(Reduce, IntegersWrapAndNaNWins) {
  int8_t a = 127, b = 1, wrapped = 0;
  const void* small[] = {&a, &b};
  reduce(&wrapped, small, 1, c10::ScalarType::Char, ReduceOp::SUM);
  EXPECT_EQ(wrapped, -128);
  float nan = std::numeric_limits<float>::quiet_NaN(), one = 1, out = 0;
  const void* first[] = {&nan, &one};
  const void* last[] = {&one, &nan};
  for (auto op : {ReduceOp::MAX, ReduceOp::MIN}) {
    reduce(&out, first, 1, c10::ScalarType::Float, op);
    EXPECT_TRUE(std::isnan(out));
    reduce(&out, last, 1, c10::ScalarType::Float, op);
    EXPECT_TRUE(std::isnan(out));
  }
}

TEST(Reduce, RefusesTypesWithoutArithmetic) {
  float x = 0;
  const void* from[] = {&x};
  EXPECT_THROW(reduce(&x, from, 1, c10::ScalarType::ComplexFloat, ReduceOp::SUM), Error);
}

}  // namespace
}  // namespace fsdp::comm
