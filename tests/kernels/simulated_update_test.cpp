// The optimizer's CUDA kernels, simulated on the CPU, against the CPU's: updates, counts, sums of
// squares and split masters. Every element goes through the same instructions, so cuts, alignment
// and the storage of a master must not change a bit.
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/simulated/testing.h"
#include "kernels/split.h"
#include "kernels/update.h"

namespace fsdp::kernels {
namespace {

// Sizes around vectors of 4 and chunks of 16384 elements.
const int64_t kSizes[] = {1, 3, 4, 77, 1000, 4097, 16384 + 5};

enum class Store { kWhole, kSplit, kBFloat16Copy, kFloat16Copy };
const Store kStores[] = {Store::kWhole, Store::kSplit, Store::kBFloat16Copy, Store::kFloat16Copy};

// How arrays are placed: aligned, all one element further, or each differently.
enum class Place { kAligned, kAlike, kMixed };
const Place kPlaces[] = {Place::kAligned, Place::kAlike, Place::kMixed};

at::Tensor placed(const at::Tensor& values, bool apart) {
  return apart ? unaligned(values) : values.clone();
}

// Values of one update, float32.
struct Values {
  at::Tensor master, grad, first, second;
};

Values some_values(int64_t numel) {
  return {torch::randn({numel}), torch::randn({numel}), torch::randn({numel}) * 0.1,
          torch::rand({numel}) * 0.01};
}

void add_states(AdamWTensors& t, const Values& v, bool apart) {
  t.exp_avg = placed(v.first, apart);
  t.exp_avg_sq = placed(v.second, apart);
}

void add_states(SGDTensors& t, const Values& v, bool apart) {
  t.momentum_buffer = placed(v.first, apart);
}

template <typename Tensors>
Tensors stored(const Values& v, Store store, at::ScalarType grad, Place place) {
  const bool apart = place != Place::kAligned;
  Tensors t;
  // A gradient may be longer than the rest, and start anywhere in its tensor.
  const int64_t begin = place == Place::kAligned ? 4 : place == Place::kAlike ? 1 : 2;
  t.grad = at::cat({torch::full({begin}, std::nanf("")), v.grad}).to(grad);
  t.grad_begin = begin;
  add_states(t, v, apart);
  if (store == Store::kWhole) {
    t.master = placed(v.master, apart);
  } else if (store == Store::kSplit) {
    t.low = placed(torch::zeros_like(v.master, at::kBFloat16), apart);
    t.rest = placed(torch::zeros_like(v.master, at::kShort), apart);
    cpu::split_float(v.master, t.low, t.rest);
  } else {
    t.master = placed(v.master, apart);
    const auto type = store == Store::kBFloat16Copy ? at::kBFloat16 : at::kHalf;
    t.low = placed(torch::zeros_like(v.master, type), apart);
  }
  return t;
}

template <typename Tensors>
at::Tensor master_of(const Tensors& t) {
  return t.rest.defined() ? join_float(t.low, t.rest) : t.master;
}

at::Tensor first_of(const AdamWTensors& t) {
  return t.exp_avg;
}
at::Tensor first_of(const SGDTensors& t) {
  return t.momentum_buffer;
}
at::Tensor second_of(const AdamWTensors& t) {
  return t.exp_avg_sq;
}
at::Tensor second_of(const SGDTensors&) {
  return {};
}

void update(std::span<const AdamWTensors> list, std::span<const AdamWStep> steps,
            const DeviceNumbers* numbers, const at::Tensor& factor) {
  simulated_updates().adamw(list, steps, numbers, factor);
}
void update(std::span<const SGDTensors> list, std::span<const SGDStep> steps,
            const DeviceNumbers* numbers, const at::Tensor& factor) {
  simulated_updates().sgd(list, steps, numbers, factor);
}
void update_on_cpu(const AdamWTensors& t, const AdamWStep& step, const at::Tensor& factor) {
  adamw(std::span(&t, 1), std::span(&step, 1), factor);
}
void update_on_cpu(const SGDTensors& t, const SGDStep& step, const at::Tensor& factor) {
  sgd(std::span(&t, 1), std::span(&step, 1), factor);
}

template <typename Tensors>
void expect_same(const Tensors& a, const Tensors& b) {
  EXPECT_TRUE(same_bits(master_of(a), master_of(b)));
  EXPECT_TRUE(same_bits(first_of(a), first_of(b)));
  if (second_of(a).defined()) {
    EXPECT_TRUE(same_bits(second_of(a), second_of(b)));
  }
}

// One update of values in every storage, against the CPU's and against each other.
template <typename Tensors, typename Step>
void expect_right(const Step& step, const at::Tensor& factor) {
  for (auto grad : {at::kFloat, at::kBFloat16})
    for (int64_t numel : kSizes) {
      Values v = some_values(numel);
      v.grad = v.grad.to(grad).to(at::kFloat);
      auto expected = stored<Tensors>(v, Store::kWhole, grad, Place::kAligned);
      update_on_cpu(expected, step, factor);
      auto whole = stored<Tensors>(v, Store::kWhole, grad, Place::kAligned);
      update(std::span(&whole, 1), std::span(&step, 1), nullptr, factor);
      EXPECT_TRUE(near(master_of(whole), master_of(expected).to(at::kDouble))) << numel;
      EXPECT_TRUE(near(first_of(whole), first_of(expected).to(at::kDouble)));
      if (second_of(whole).defined()) {
        EXPECT_TRUE(near(second_of(whole), second_of(expected).to(at::kDouble)));
      }
      for (Store store : kStores)
        for (Place place : kPlaces) {
          SCOPED_TRACE(::testing::Message()
                       << numel << " of " << grad << ", stored as " << static_cast<int>(store)
                       << ", placed as " << static_cast<int>(place));
          auto t = stored<Tensors>(v, store, grad, place);
          update(std::span(&t, 1), std::span(&step, 1), nullptr, factor);
          expect_same(t, whole);
          if (t.master.defined() && t.low.defined()) {
            EXPECT_TRUE(same_bits(t.low, t.master.to(t.low.scalar_type())));
          }
        }
    }
}

TEST(SimulatedAdamW, IsTheSameHoweverNumbersAreStored) {
  const AdamWStep step{.lr = 0.01, .weight_decay = 0.1, .step = 3};
  expect_right<AdamWTensors>(step, {});
  expect_right<AdamWTensors>(step, torch::full({}, 0.37f));
}

TEST(SimulatedAdamW, GoesUpWhereItIsToldTo) {
  expect_right<AdamWTensors>(AdamWStep{.lr = 0.01, .maximize = true}, torch::full({}, 2.0f));
}

TEST(SimulatedSGD, IsTheSameHoweverNumbersAreStored) {
  expect_right<SGDTensors>(SGDStep{.lr = 0.1, .weight_decay = 0.01}, {});
  expect_right<SGDTensors>(SGDStep{.lr = 0.1, .momentum = 0.9, .dampening = 0.2},
                           torch::full({}, 0.5f));
  expect_right<SGDTensors>(SGDStep{.lr = 0.1, .momentum = 0.9, .nesterov = true, .maximize = true},
                           {});
}

TEST(SimulatedSGD, DoesNotReadItsFirstBuffer) {
  Values v = some_values(77);
  v.first = torch::full({77}, std::nanf(""));
  const SGDStep step{.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .first = true};
  auto made = stored<SGDTensors>(v, Store::kSplit, at::kFloat, Place::kAlike);
  update(std::span(&made, 1), std::span(&step, 1), nullptr, {});
  auto expected = stored<SGDTensors>(v, Store::kWhole, at::kFloat, Place::kAligned);
  update_on_cpu(expected, step, {});
  EXPECT_TRUE(near(master_of(made), master_of(expected).to(at::kDouble)));
  EXPECT_TRUE(same_bits(made.momentum_buffer, v.grad));
}

template <typename Tensors, typename Step>
void expect_skipped(const Step& step) {
  for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity()})
    for (Store store : kStores) {
      const Values v = some_values(77);
      auto t = stored<Tensors>(v, store, at::kFloat, Place::kAligned);
      const auto before = stored<Tensors>(v, store, at::kFloat, Place::kAligned);
      const DeviceNumbers numbers{torch::full({1, 2}, 0.1, at::kDouble),
                                  torch::full({1}, 5.0, at::kDouble)};
      update(std::span(&t, 1), std::span(&step, 1), nullptr, torch::full({}, bad));
      update(std::span(&t, 1), std::span(&step, 1), &numbers, torch::full({}, bad));
      expect_same(t, before);
      if (t.low.defined()) {
        EXPECT_TRUE(same_bits(t.low, before.low));
      }
      EXPECT_EQ(numbers.counts.template item<double>(), 5.0);
    }
}

TEST(SimulatedUpdates, AreSkippedWhereTheFactorIsNotFinite) {
  expect_skipped<AdamWTensors>(AdamWStep{});
  expect_skipped<SGDTensors>(SGDStep{.momentum = 0.9});
}

// More pieces than a launch takes, of every kind and size, each with its own numbers.
template <typename Tensors, typename Step, typename Vary>
void expect_list_as_alone(const Step& step, const Vary& vary) {
  std::vector<Tensors> list, alone;
  std::vector<Step> steps;
  for (int i = 0; i < 600; ++i) {
    const Values v = some_values(i % 50 == 7 ? 20000 : i % 9 == 0 ? 0 : 1 + i % 40);
    const Store store = kStores[i % 29 == 0 ? i % 4 : 1];
    const Place place = kPlaces[i % 3];
    list.push_back(stored<Tensors>(v, store, i % 31 == 0 ? at::kFloat : at::kBFloat16, place));
    alone.push_back(stored<Tensors>(v, store, i % 31 == 0 ? at::kFloat : at::kBFloat16, place));
    steps.push_back(step);
    vary(steps.back(), i);
  }
  update(list, steps, nullptr, {});
  for (size_t i = 0; i < list.size(); ++i) {
    SCOPED_TRACE(i);
    update(std::span(&alone[i], 1), std::span(&steps[i], 1), nullptr, {});
    expect_same(list[i], alone[i]);
  }
}

TEST(SimulatedUpdates, OfALongListAreThoseOfEachPiece) {
  expect_list_as_alone<AdamWTensors>(AdamWStep{.lr = 0.01}, [](AdamWStep& step, int i) {
    step.lr *= 1 + i % 3, step.weight_decay = i % 2, step.step = 1 + i % 5;
  });
  expect_list_as_alone<SGDTensors>(SGDStep{.lr = 0.01, .momentum = 0.9}, [](SGDStep& step, int i) {
    step.lr *= 1 + i % 3, step.weight_decay = i % 2, step.first = i % 5 == 0;
  });
}

// Learning rates and counts on the device give the same bits as the same numbers from the host.
template <typename Tensors, typename Step, typename Tell>
void expect_device_numbers(const Step& step, const Tell& tell) {
  constexpr int kPieces = 300, kGroups = 3, kCounts = 4500;
  std::vector<Tensors> list, alone;
  for (int i = 0; i < kPieces; ++i) {
    const Values v = some_values(1 + i % 20);
    for (auto* to : {&list, &alone}) {
      to->push_back(stored<Tensors>(v, kStores[i % 4], at::kFloat, kPlaces[i % 3]));
      to->back().group = i % kGroups;
      to->back().count = i * 15 % kCounts;  // some share one
    }
  }
  const DeviceNumbers numbers{torch::rand({kGroups, 2}, at::kDouble),
                              torch::zeros({kCounts}, at::kDouble)};
  numbers.counts.slice(0, 0, kCounts, 2).fill_(6);
  const auto before = numbers.counts.clone();
  for (int turn = 1; turn <= 2; ++turn) {
    update(list, std::span(&step, 1), &numbers, {});
    for (size_t i = 0; i < list.size(); ++i) {
      SCOPED_TRACE(i);
      const auto count = before[list[i].count].template item<double>() + turn;
      EXPECT_EQ(numbers.counts[list[i].count].template item<double>(), count);
      Step told = step;
      tell(told, numbers.rates[list[i].group][0].template item<double>(),
           numbers.rates[list[i].group][1].template item<double>(), count);
      update(std::span(&alone[i], 1), std::span(&told, 1), nullptr, {});
      expect_same(list[i], alone[i]);
    }
  }
  std::vector<bool> named(kCounts);
  for (const auto& t : list) named[t.count] = true;
  for (int64_t i = 0; i < kCounts; ++i)
    ASSERT_TRUE(named[i] || numbers.counts[i].template item<double>() == (i % 2 == 0 ? 6 : 0));
}

TEST(SimulatedUpdates, ReadNumbersFromTheDevice) {
  expect_device_numbers<AdamWTensors>(
      AdamWStep{}, [](AdamWStep& step, double lr, double weight_decay, double count) {
        step.lr = lr, step.weight_decay = weight_decay, step.step = static_cast<int64_t>(count);
      });
  expect_device_numbers<SGDTensors>(
      SGDStep{.momentum = 0.9}, [](SGDStep& step, double lr, double weight_decay, double count) {
        step.lr = lr, step.weight_decay = weight_decay, step.first = count == 1;
      });
}

// --- sums ---

TEST(SimulatedSums, AddSquaresOfAnyListOfTensors) {
  std::vector<at::Tensor> list;
  double expected = 0;
  for (int i = 0; i < 700; ++i) {  // more than a launch takes
    const int64_t numel = i % 100 == 3 ? 40000 : i % 11 == 0 ? 0 : 1 + i % 60;
    list.push_back(made_up({numel}, kDtypes[i % 3], i % 2 == 0));
    expected += exact(list.back()).square().sum().item<double>();
  }
  const auto& table = simulated_updates();
  const double total = table.sum_of_squares(list).item<double>();
  EXPECT_NEAR(total, expected, 1e-6 * expected);
  {
    const Simulated in_other_order(/*reversed=*/true);
    EXPECT_EQ(table.sum_of_squares(list).item<double>(), total);
  }

  const auto clipped = table.clip(list, 5.0);
  EXPECT_NEAR(clipped.norm.item<float>(), std::sqrt(expected), 1e-6 * std::sqrt(expected));
  EXPECT_NEAR(clipped.factor.item<float>(), 5 / std::sqrt(expected), 1e-6);
  const auto again = table.clip_factor(torch::full({}, total, at::kDouble), 5.0);
  EXPECT_TRUE(same_bits(again.norm, clipped.norm));
  EXPECT_TRUE(same_bits(again.factor, clipped.factor));
  EXPECT_EQ(table.clip(list, 1e9).factor.item<float>(), 1.0f);
}

TEST(SimulatedSums, TellWhatIsNotFinite) {
  const auto& table = simulated_updates();
  for (auto type : kDtypes)
    for (int64_t numel : {1, 77, 16390})
      for (int64_t at : {int64_t{0}, numel / 2, numel - 1})
        for (double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
          std::vector<at::Tensor> list{made_up({5}, type), made_up({numel}, type, numel == 77)};
          list[1][at] = bad;
          const auto clipped = table.clip(list, 1.0);
          EXPECT_FALSE(std::isfinite(clipped.norm.item<float>()));
          EXPECT_TRUE(std::isnan(clipped.factor.item<float>()));
        }
  EXPECT_EQ(table.sum_of_squares(std::vector{torch::zeros({0})}).item<double>(), 0);
}

// --- split masters ---

TEST(SimulatedSplit, GivesEveryBitBack) {
  const auto& table = simulated_updates();
  const auto patterns = torch::randint(INT32_MIN, INT32_MAX, {16390}, at::kLong).to(at::kInt);
  const auto edges = torch::tensor({0, 0x8000, 0x7fff, 0x18000, 0x3f808000, 0x3f807fff, 0x7f7fffff,
                                    0x7f800000, 0x7fc00000, 0x7f800001, 1},
                                   at::kInt);
  const auto bits = at::cat({edges, edges.bitwise_or(INT32_MIN), patterns});
  for (int64_t numel : {int64_t{1}, int64_t{3}, int64_t{77}, bits.numel()})
    for (bool apart : {false, true}) {
      const auto whole = placed(bits.narrow(0, 0, numel).view(at::kFloat), apart);
      const auto high = placed(torch::zeros({numel}, at::kBFloat16), apart);
      const auto rest = placed(torch::zeros({numel}, at::kShort), apart);
      table.split_float(whole, high, rest);
      const auto expected_high = at::empty_like(high), expected_rest = at::empty_like(rest);
      cpu::split_float(whole, expected_high, expected_rest);
      EXPECT_TRUE(same_bits(high, expected_high));
      EXPECT_TRUE(same_bits(rest, expected_rest));
      const auto nan = torch::full({}, std::nanf(""));
      EXPECT_TRUE(same_bits(table.join_float(high, rest), at::where(whole.isnan(), nan, whole)));
    }
}

}  // namespace
}  // namespace fsdp::kernels
