// Updates of split masters, of lists of tensors, with bfloat16 gradients and with learning rates
// and counts on the device; the global norm. The same tests on the CPU and on a GPU.
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/modules.h"
#include "fsdp/error.h"
#include "kernels/split.h"
#include "kernels/testing.h"
#include "kernels/update.h"

namespace fsdp::kernels {
namespace {

class OnDevice : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    torch::manual_seed(3);
    if (std::string(GetParam()) == "cpu") return;
    find_library("cuda");  // loads LibTorch's CUDA library
    if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  }
  at::Device device() const { return at::Device(GetParam()); }
  bool cpu() const { return device().is_cpu(); }
  at::Tensor random(int64_t size, at::ScalarType type = at::kFloat) const {
    return torch::randn({size}).to(type).to(device());
  }
  at::Tensor one(float value) const { return torch::full({}, value).to(device()); }
};

class SplitNumbers : public OnDevice {};
class SplitMasters : public OnDevice {};
class UpdateLists : public OnDevice {};
class NumbersOnTheDevice : public OnDevice {};
class GlobalNorm : public OnDevice {};
#define ON_DEVICES(suite)                                                    \
  INSTANTIATE_TEST_SUITE_P(Devices, suite, ::testing::Values("cpu", "cuda"), \
                           [](const auto& info) { return std::string(info.param); })
ON_DEVICES(SplitNumbers);
ON_DEVICES(SplitMasters);
ON_DEVICES(UpdateLists);
ON_DEVICES(NumbersOnTheDevice);
ON_DEVICES(GlobalNorm);

bool near(const at::Tensor& a, const at::Tensor& b, double tolerance = 1e-6) {
  return at::allclose(a.to(at::kDouble), b.to(at::kDouble), tolerance, tolerance);
}

// --- split numbers ---

// The value of a bfloat16's bits. The successor of the largest counts as 2^128, as in rounding.
double value_of(uint32_t high) {
  const double sign = high & 0x8000 ? -1 : 1;
  if ((high & 0x7fff) == 0x7f80) return sign * std::ldexp(1.0, 128);
  return std::bit_cast<float>(high << 16);
}

// The nearest bfloat16, by distances in float64; ties go away from zero.
uint32_t nearest(float x) {
  const uint32_t below = std::bit_cast<uint32_t>(x) >> 16;  // towards zero
  if ((below & 0x7fff) >= 0x7f80) return below;             // an infinity
  const double down = std::abs(static_cast<double>(x) - value_of(below));
  const double up = std::abs(value_of(below + 1) - static_cast<double>(x));
  return up <= down ? below + 1 : below;
}

std::vector<float> all_kinds_of_numbers() {
  std::vector<float> numbers;
  for (uint32_t bits :
       {0x00000000u, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7f7fffffu, 0xff7fffffu, 0x7f7f8000u,
        0x7f7f7fffu, 0x00000001u, 0x80000001u, 0x00008000u, 0x80008000u, 0x00007fffu, 0x00018000u,
        0x3f808000u, 0x3f818000u, 0xbf808000u, 0xbf818000u, 0x007fffffu, 0x00800000u})
    numbers.push_back(std::bit_cast<float>(bits));
  const auto random = torch::randint(0, int64_t{1} << 32, {100000}, at::kLong);
  for (int64_t i = 0; i < random.numel(); ++i) {
    const auto bits = static_cast<uint32_t>(random.const_data_ptr<int64_t>()[i]);
    if (!std::isnan(std::bit_cast<float>(bits))) numbers.push_back(std::bit_cast<float>(bits));
    if (i % 100 == 0)
      numbers.push_back(std::bit_cast<float>((bits & 0x7f7f0000u) | 0x8000u));  // a tie
  }
  return numbers;
}

TEST_P(SplitNumbers, GiveEveryBitBackAndAreTheNearestBfloat16) {
  const auto given = torch::tensor(all_kinds_of_numbers());
  for (int64_t cut : {0, 1, 3, 5}) {  // other alignments, other ends
    const auto whole = given.to(device()).slice(0, cut);
    const auto high = at::zeros_like(whole, at::kBFloat16),
               rest = at::zeros_like(whole, at::kShort);
    split_float(whole, high, rest);
    EXPECT_TRUE(same_bits(join_float(high, rest), whole)) << cut;
    const auto bits = high.cpu().view(at::kShort);
    int64_t wrong = 0;
    for (int64_t i = 0; i < bits.numel(); ++i)
      wrong += static_cast<uint16_t>(bits.const_data_ptr<int16_t>()[i]) !=
               nearest(given.const_data_ptr<float>()[cut + i]);
    EXPECT_EQ(wrong, 0) << cut;

    const auto high2 = at::zeros_like(high), rest2 = at::zeros_like(rest);
    aten::split_float(whole, high2, rest2);
    EXPECT_TRUE(same_bits(high2, high) && same_bits(rest2, rest));
    EXPECT_TRUE(same_bits(aten::join_float(high, rest), whole));
  }
}

TEST_P(SplitNumbers, EveryNaNBecomesTheSame) {
  std::vector<float> values;
  for (uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu, 0x7fc00000u})
    values.push_back(std::bit_cast<float>(bits));
  const auto whole = torch::tensor(values).to(device());
  const auto high = at::zeros_like(whole, at::kBFloat16), rest = at::zeros_like(whole, at::kShort);
  const auto expected = at::full({5}, std::bit_cast<float>(0x7fc00000u));
  split_float(whole, high, rest);
  EXPECT_TRUE(same_bits(join_float(high, rest), expected));
  aten::split_float(whole, high, rest);
  EXPECT_TRUE(same_bits(aten::join_float(high, rest), expected));
}

TEST_P(SplitNumbers, HalvesThatDoNotFitAreAnError) {
  const auto whole = random(10), high = random(10, at::kBFloat16);
  const auto rest = at::zeros_like(whole, at::kShort);
  EXPECT_THROW(split_float(whole, whole, rest), Error);
  EXPECT_THROW(split_float(whole, high, rest.slice(0, 1)), Error);
  EXPECT_THROW(split_float(whole.to(at::kDouble), high, rest), Error);
  EXPECT_THROW(join_float(high, high), Error);
}

// --- updates ---

// The tensors of an update, with a whole or a split master.
template <typename Tensors>
Tensors halved(const Tensors& from) {
  Tensors to = from;
  to.low = at::zeros_like(from.master, at::kBFloat16);
  to.rest = at::zeros_like(from.master, at::kShort);
  split_float(from.master, to.low, to.rest);
  to.master = at::Tensor();
  return to;
}

template <typename Tensors>
at::Tensor master_of(const Tensors& t) {
  return t.rest.defined() ? join_float(t.low, t.rest) : t.master;
}

AdamWTensors copy(AdamWTensors t) {
  for (auto* tensor : {&t.master, &t.exp_avg, &t.exp_avg_sq, &t.low, &t.rest})
    if (tensor->defined()) *tensor = tensor->clone();
  return t;
}

void step_one(const AdamWTensors& t, const AdamWStep& step, const at::Tensor& factor = {}) {
  adamw(std::span(&t, 1), std::span(&step, 1), factor);
}

void step_one(const SGDTensors& t, const SGDStep& step, const at::Tensor& factor = {}) {
  sgd(std::span(&t, 1), std::span(&step, 1), factor);
}

TEST_P(SplitMasters, AdamWEqualsAWholeMasterBitForBit) {
  for (auto grad_type : {at::kFloat, at::kBFloat16})
    for (int64_t size : {1, 7, 1000, 50021}) {
      AdamWTensors whole{
          random(size), {}, at::zeros({size}, device()), at::zeros({size}, device())};
      AdamWTensors split = halved(copy(whole));
      for (int step = 1; step <= 20; ++step) {
        whole.grad = split.grad = random(size, grad_type);
        const AdamWStep options{
            .lr = 1e-2, .weight_decay = 0.1, .step = step, .maximize = step % 5 == 0};
        const auto factor = step % 2 == 0 ? one(0.3f) : at::Tensor();
        step_one(whole, options, factor);
        step_one(split, options, factor);
      }
      EXPECT_TRUE(same_bits(master_of(split), whole.master)) << grad_type << size;
      EXPECT_TRUE(same_bits(split.exp_avg, whole.exp_avg)) << grad_type << size;
      EXPECT_TRUE(same_bits(split.exp_avg_sq, whole.exp_avg_sq)) << grad_type << size;
    }
}

TEST_P(SplitMasters, SGDEqualsAWholeMasterBitForBit) {
  for (auto grad_type : {at::kFloat, at::kBFloat16})
    for (double momentum : {0.0, 0.9})
      for (bool nesterov : {false, true}) {
        const int64_t size = 10007;
        SGDTensors whole{random(size), {}, momentum == 0 ? at::Tensor() : random(size)};
        SGDTensors split = halved(whole);
        whole.master = whole.master.clone();
        if (momentum != 0) split.momentum_buffer = whole.momentum_buffer.clone();
        for (int step = 1; step <= 5; ++step) {
          whole.grad = split.grad = random(size, grad_type);
          const SGDStep options{.lr = 0.05,
                                .momentum = momentum,
                                .weight_decay = 0.1,
                                .nesterov = nesterov && momentum != 0,
                                .first = step == 1};
          step_one(whole, options, one(0.5f));
          step_one(split, options, one(0.5f));
        }
        EXPECT_TRUE(same_bits(master_of(split), whole.master)) << momentum << nesterov;
        if (momentum != 0) {
          EXPECT_TRUE(same_bits(split.momentum_buffer, whole.momentum_buffer));
        }
      }
}

TEST_P(SplitMasters, AdamWWithBfloat16GradientsEqualsADoubleReference) {
  const int64_t size = 20011;
  AdamWTensors t = halved<AdamWTensors>(
      {random(size), {}, at::zeros({size}, device()), at::zeros({size}, device())});
  auto w = master_of(t).to(at::kDouble), m = at::zeros_like(w), v = at::zeros_like(w);
  for (int step = 1; step <= 10; ++step) {
    t.grad = random(size, at::kBFloat16);
    const AdamWStep o{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.9, .weight_decay = 0.1, .step = step};
    step_one(t, o, one(0.5f));
    const auto g = t.grad.to(at::kDouble) * 0.5;
    m = m * o.beta1 + g * (1 - o.beta1);
    v = v * o.beta2 + g * g * (1 - o.beta2);
    w = w * (1 - o.lr * o.weight_decay) - o.lr * (m / (1 - std::pow(o.beta1, step))) /
                                              ((v / (1 - std::pow(o.beta2, step))).sqrt() + o.eps);
  }
  EXPECT_TRUE(near(master_of(t), w, 2e-6));
  EXPECT_TRUE(near(t.exp_avg, m));
  EXPECT_TRUE(near(t.exp_avg_sq, v));
}

TEST_P(SplitMasters, TheOperatorsOfLibTorchGiveTheSame) {
  const int64_t size = 1000;
  AdamWTensors ours = halved<AdamWTensors>(
      {random(size), random(size, at::kBFloat16), random(size), random(size).abs()});
  AdamWTensors theirs = copy(ours);
  const AdamWStep options{.lr = 1e-2, .weight_decay = 0.1, .step = 3};
  step_one(ours, options, one(0.3f));
  aten::adamw(std::span(&theirs, 1), std::span(&options, 1), one(0.3f));
  EXPECT_TRUE(near(master_of(theirs), master_of(ours)));
  EXPECT_TRUE(near(theirs.exp_avg, ours.exp_avg));
}

TEST_P(SplitMasters, HalvesThatDoNotFitAreAnError) {
  AdamWTensors t = halved<AdamWTensors>({random(10), random(10), random(10), random(10)});
  AdamWTensors both = t, short_rest = t, no_low = t, wrong = t;
  both.master = random(10);
  short_rest.rest = t.rest.slice(0, 1);
  no_low.low = at::Tensor();
  wrong.grad = random(10, at::kHalf);
  for (const auto& bad : {both, short_rest, no_low, wrong}) EXPECT_THROW(step_one(bad, {}), Error);
  step_one(t, {});
}

// Every kind of update in one list: whole, split and 16-bit masters, copies, 16-bit gradients, and
// gradients inside a longer tensor.
std::vector<AdamWTensors> mixture(at::Device device) {
  const auto random = [&](int64_t size, at::ScalarType type = at::kFloat) {
    return torch::randn({size}).to(type).to(device);
  };
  std::vector<AdamWTensors> list;
  for (int64_t size : {1, 5, 1000, 20011})
    for (int kind = 0; kind < 6; ++kind) {
      const auto grad_type = kind % 2 == 0 ? at::kFloat : at::kBFloat16;
      const auto type = kind == 5 ? at::kBFloat16 : at::kFloat;
      AdamWTensors t{random(size, type), random(size + 10, grad_type), random(size, type),
                     random(size, type).abs()};
      if (kind < 2) t = halved(t);
      if (kind == 2) t.low = at::zeros({size}, t.master.options().dtype(at::kBFloat16));
      if (kind == 3) t.low = at::zeros({size}, t.master.options().dtype(at::kHalf));
      t.grad_begin = kind;
      t.group = kind % 2;
      t.count = kind == 5 ? 2 : kind % 2;  // tensors that share a count have masters of one dtype
      list.push_back(t);
    }
  return list;
}

bool same_results(const AdamWTensors& a, const AdamWTensors& b) {
  bool same = same_bits(master_of(a), master_of(b)) && same_bits(a.exp_avg, b.exp_avg) &&
              same_bits(a.exp_avg_sq, b.exp_avg_sq);
  return same && (!a.low.defined() || same_bits(a.low, b.low));
}

std::vector<AdamWTensors> copies(const std::vector<AdamWTensors>& list) {
  std::vector<AdamWTensors> result;
  for (const auto& t : list) result.push_back(copy(t));
  return result;
}

TEST_P(UpdateLists, GiveWhatSingleCallsGive) {
  const auto list = mixture(device());
  const auto single = copies(list);
  std::vector<AdamWStep> steps;
  for (size_t i = 0; i < list.size(); ++i)
    steps.push_back({.lr = 1e-3 * static_cast<double>(i % 3 + 1),
                     .weight_decay = 0.1,
                     .step = static_cast<int64_t>(i % 4 + 1)});
  adamw(list, steps, {});
  for (size_t i = 0; i < list.size(); ++i) {
    step_one(single[i], steps[i]);
    EXPECT_TRUE(same_results(list[i], single[i])) << i;
  }
}

TEST_P(UpdateLists, AreLongAndNeedAStepForEach) {
  const int64_t size = 3000;
  AdamWTensors whole{random(size), random(size), random(size), random(size).abs()};
  const AdamWTensors cut = copy(whole);
  std::vector<AdamWTensors> pieces;  // five elements each, all views of one flat
  for (int64_t at = 0; at < size; at += 5)
    pieces.push_back({cut.master.narrow(0, at, 5),
                      cut.grad,
                      cut.exp_avg.narrow(0, at, 5),
                      cut.exp_avg_sq.narrow(0, at, 5),
                      {},
                      {},
                      at});
  const AdamWStep options{.lr = 1e-2, .step = 2};
  step_one(whole, options);
  adamw(pieces, std::span(&options, 1), {});
  EXPECT_TRUE(same_results(cut, whole));
  EXPECT_THROW(adamw(pieces, std::vector<AdamWStep>(7), {}), Error);
}

TEST_P(UpdateLists, AreSkippedWhereTheFactorIsNotFinite) {
  for (float factor : {INFINITY, -INFINITY, NAN}) {
    const auto list = mixture(device());
    const auto before = copies(list);
    const AdamWStep options{.lr = 1e-2};
    adamw(list, std::span(&options, 1), one(factor));
    aten::adamw(list, std::span(&options, 1), one(factor));
    SGDTensors plain{random(100), random(100), random(100)};
    const auto weights = plain.master.clone(), buffer = plain.momentum_buffer.clone();
    step_one(plain, {.momentum = 0.9}, one(factor));
    for (size_t i = 0; i < list.size(); ++i) {
      EXPECT_TRUE(same_bits(master_of(list[i]), master_of(before[i]))) << i;
      EXPECT_TRUE(same_bits(list[i].exp_avg, before[i].exp_avg)) << i;
    }
    EXPECT_TRUE(same_bits(plain.master, weights) && same_bits(plain.momentum_buffer, buffer));
  }
}

// --- rates and counts on the device ---

const double kRates[2][2] = {{1e-2, 0.1}, {3e-4, 0.0}};
const double kCounts[3] = {0, 6, 41};

DeviceNumbers numbers_on(at::Device device) {
  DeviceNumbers numbers{at::zeros({2, 2}, at::kDouble), at::zeros({3}, at::kDouble)};
  std::memcpy(numbers.rates.mutable_data_ptr(), kRates, sizeof(kRates));
  std::memcpy(numbers.counts.mutable_data_ptr(), kCounts, sizeof(kCounts));
  return {numbers.rates.to(device), numbers.counts.to(device)};
}

void expect_counts(const DeviceNumbers& numbers, double more) {
  const auto counts = numbers.counts.cpu();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(counts.const_data_ptr<double>()[i], kCounts[i] + more) << i;
}

TEST_P(NumbersOnTheDevice, GiveWhatTheHostsNumbersGive) {
  const auto list = mixture(device());
  const auto expected = copies(list), theirs = copies(list);
  const AdamWStep shared{.beta1 = 0.8, .beta2 = 0.95};
  const auto numbers = numbers_on(device()), their_numbers = numbers_on(device());
  for (int round = 1; round <= 3; ++round) {
    adamw(list, shared, numbers, one(0.7f));
    aten::adamw(theirs, shared, their_numbers, one(0.7f));
    for (const auto& t : expected) {
      AdamWStep step = shared;
      step.lr = kRates[t.group][0];
      step.weight_decay = kRates[t.group][1];
      step.step = static_cast<int64_t>(kCounts[t.count]) + round;
      AdamWTensors fresh = t;
      fresh.grad = t.grad.clone();  // LibTorch's operators would leave it multiplied
      step_one(fresh, step, one(0.7f));
    }
  }
  expect_counts(numbers, 3);
  expect_counts(their_numbers, 3);
  for (size_t i = 0; i < list.size(); ++i) {
    // A GPU's powers may differ from the host's in the last bit.
    if (cpu()) {
      EXPECT_TRUE(same_results(list[i], expected[i])) << i;
    }
    const bool rounded = list[i].exp_avg.scalar_type() == at::kBFloat16;
    EXPECT_TRUE(near(master_of(list[i]), master_of(expected[i]), rounded ? 2e-2 : 1e-6)) << i;
    EXPECT_TRUE(near(master_of(theirs[i]), master_of(expected[i]), rounded ? 2e-2 : 2e-6)) << i;
  }
}

TEST_P(NumbersOnTheDevice, OfSGDKnowTheFirstUpdate) {
  for (double momentum : {0.0, 0.9}) {
    const auto numbers = numbers_on(device()), their_numbers = numbers_on(device());
    SGDTensors t{random(1003), {}, momentum == 0 ? at::Tensor() : at::full({1003}, NAN, device())};
    SGDTensors expected = t, theirs = t;
    for (auto* other : {&expected, &theirs}) {
      other->master = t.master.clone();
      if (momentum != 0) other->momentum_buffer = t.momentum_buffer.clone();
    }
    for (int round = 1; round <= 3; ++round) {
      t.grad = expected.grad = theirs.grad = random(1003);
      const SGDStep shared{.momentum = momentum};
      sgd(std::span(&t, 1), shared, numbers, {});
      aten::sgd(std::span<const SGDTensors>(&theirs, 1), shared, their_numbers, {});
      step_one(expected,
               {.lr = 1e-2, .momentum = momentum, .weight_decay = 0.1, .first = round == 1});
    }
    EXPECT_TRUE(same_bits(t.master, expected.master));
    EXPECT_TRUE(near(theirs.master, expected.master));
    EXPECT_EQ(numbers.counts[0].item<double>(), 3);
    EXPECT_EQ(numbers.counts[1].item<double>(), 6);  // no tensor uses it
  }
}

TEST_P(NumbersOnTheDevice, AreNotCountedWhereTheFactorIsNotFinite) {
  const auto list = mixture(device());
  const auto before = copies(list);
  const auto numbers = numbers_on(device());
  adamw(list, AdamWStep{}, numbers, one(NAN));
  aten::adamw(list, AdamWStep{}, numbers, one(INFINITY));
  expect_counts(numbers, 0);
  for (size_t i = 0; i < list.size(); ++i)
    EXPECT_TRUE(same_bits(master_of(list[i]), master_of(before[i]))) << i;
}

TEST_P(NumbersOnTheDevice, ThatDoNotFitAreAnError) {
  AdamWTensors t{random(5), random(5), random(5), random(5)};
  auto numbers = numbers_on(device());
  t.count = 3;
  EXPECT_THROW(adamw(std::span<const AdamWTensors>(&t, 1), AdamWStep{}, numbers, {}), Error);
  t.count = 0;
  numbers.rates = numbers.rates.to(at::kFloat);
  EXPECT_THROW(adamw(std::span<const AdamWTensors>(&t, 1), AdamWStep{}, numbers, {}), Error);
}

// --- the global norm ---

TEST_P(GlobalNorm, OfListsEqualsADoubleReference) {
  for (int64_t size : {1, 7, 1000, 300007}) {
    std::vector<at::Tensor> list;
    double expected = 0;
    for (auto type : {at::kFloat, at::kBFloat16, at::kHalf})
      for (int64_t cut : {0, 1, 3}) {
        list.push_back(random(size + cut, type).slice(0, cut));
        expected += list.back().to(at::kDouble).square().sum().item<double>();
      }
    list.push_back(random(0));
    const auto total = sum_of_squares(list);
    ASSERT_EQ(total.scalar_type(), at::kDouble);
    EXPECT_EQ(total.device().type(), device().type());
    EXPECT_NEAR(total.item<double>(), expected, 1e-6 * expected);
    EXPECT_TRUE(same_bits(total, sum_of_squares(list)));
    const double norm = std::sqrt(expected);
    for (double most : {norm / 4, norm * 4, std::numeric_limits<double>::infinity()}) {
      const auto one_pass = clip_factor(list, most), two = clip_factor(total, most);
      const auto theirs = aten::clip_factor(total, most);
      EXPECT_NEAR(one_pass.norm.item<double>(), norm, 1e-6 * norm);
      EXPECT_NEAR(one_pass.factor.item<double>(), most < norm ? 0.25 : 1.0, 1e-6 + 1e-5 / norm);
      EXPECT_TRUE(same_bits(one_pass.norm, two.norm) && same_bits(one_pass.factor, two.factor));
      EXPECT_TRUE(near(theirs.norm, two.norm) && near(theirs.factor, two.factor));
      EXPECT_EQ(one_pass.factor.scalar_type(), at::kFloat);
    }
  }
}

TEST_P(GlobalNorm, ThatIsNotFiniteGivesAFactorThatSkips) {
  for (float bad : {INFINITY, NAN}) {
    std::vector<at::Tensor> list = {random(1000), random(70001)};
    list[1][70000] = bad;
    const auto clipping = clip_factor(list, 1.0);
    EXPECT_FALSE(std::isfinite(clipping.norm.item<float>()));
    EXPECT_FALSE(std::isfinite(clipping.factor.item<float>()));
    EXPECT_FALSE(std::isfinite(aten::clip_factor(sum_of_squares(list), 1.0).factor.item<float>()));
  }
}

}  // namespace
}  // namespace fsdp::kernels
