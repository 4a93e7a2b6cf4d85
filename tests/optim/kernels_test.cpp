// The update kernels against references in float64 and against torch::optim, for any cuts of the
// flats and any number of threads.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <mutex>
#include <set>
#include <thread>

#include "comm/modules.h"
#include "fsdp/error.h"
#include "kernels/cpu/parallel.h"
#include "kernels/testing.h"
#include "kernels/update.h"

namespace fsdp::kernels {
namespace {

const int64_t kSizes[] = {0, 1, 7, 64, 1000, 100003};
const double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor random(int64_t size, at::ScalarType type = at::kFloat) {
  return torch::randn({size}, at::kDouble).to(type);
}

::testing::AssertionResult near(const at::Tensor& actual, const at::Tensor& expected, double rtol,
                                double atol) {
  auto a = actual.to(at::kDouble), b = expected.to(at::kDouble);
  if (at::allclose(a, b, rtol, atol)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "largest difference " << (a - b).abs().max().item<double>();
}

// The rounding error of a dtype, as a tolerance.
double epsilon(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 1e-14;
    case at::kFloat:
      return 1e-6;
    case at::kHalf:
      return 2e-3;
    default:
      return 1.6e-2;
  }
}

struct Threads {
  explicit Threads(int count) : before(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before); }
  int before;
};

// --- AdamW ---

struct Adam {
  Adam(int64_t size, at::ScalarType type, at::ScalarType low_type)
      : master(random(size, type)), exp_avg(at::zeros_like(master)), exp_avg_sq(exp_avg.clone()) {
    if (low_type != at::ScalarType::Undefined) low = at::full({size}, 77, low_type);
  }
  Adam part(int64_t begin, int64_t end) const {
    Adam cut = *this;
    for (auto* t : {&cut.master, &cut.exp_avg, &cut.exp_avg_sq}) *t = t->slice(0, begin, end);
    if (low.defined()) cut.low = low.slice(0, begin, end);
    return cut;
  }
  Adam clone() const {
    Adam copy = *this;
    for (auto* t : {&copy.master, &copy.exp_avg, &copy.exp_avg_sq}) *t = t->clone();
    if (low.defined()) copy.low = low.clone();
    return copy;
  }
  void step(const at::Tensor& grad, const AdamWStep& step, const at::Tensor& factor = {}) {
    adamw(master, grad, exp_avg, exp_avg_sq, low, step, factor);
  }
  // The definition, in float64 and with states rounded to the master's dtype after every step.
  void reference_step(const at::Tensor& grad, const AdamWStep& step, double factor) {
    const auto type = master.scalar_type();
    auto g = grad.to(at::kDouble) * (step.maximize ? -factor : factor);
    auto m = exp_avg.to(at::kDouble) * step.beta1 + g * (1 - step.beta1);
    auto v = exp_avg_sq.to(at::kDouble) * step.beta2 + g * g * (1 - step.beta2);
    auto m_hat = m / (1 - std::pow(step.beta1, step.step));
    auto v_hat = v / (1 - std::pow(step.beta2, step.step));
    auto w = master.to(at::kDouble) * (1 - step.lr * step.weight_decay);
    w = w - step.lr * m_hat / (v_hat.sqrt() + step.eps);
    master = w.to(type), exp_avg = m.to(type), exp_avg_sq = v.to(type);
  }

  at::Tensor master, exp_avg, exp_avg_sq, low;
};

TEST(AdamWKernel, EqualsTorchOptimOverManySteps) {
  for (int64_t size : kSizes) {
    for (double decay : {0.0, 0.1}) {
      Adam ours(size, at::kFloat, at::kBFloat16);
      auto theirs = ours.master.clone().set_requires_grad(true);
      torch::optim::AdamW optimizer(
          {theirs},
          torch::optim::AdamWOptions(1e-2).betas({0.9, 0.95}).eps(1e-8).weight_decay(decay));
      for (int step = 1; step <= 30; ++step) {
        auto grad = random(size);
        theirs.mutable_grad() = grad.clone();
        optimizer.step();
        ours.step(grad,
                  {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = decay, .step = step});
      }
      EXPECT_TRUE(near(ours.master, theirs.detach(), 1e-6, 2e-6)) << size << " " << decay;
    }
  }
}

TEST(AdamWKernel, EveryOptionEqualsADoubleReference) {
  for (auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (int64_t size : kSizes)
      for (double decay : {0.0, 0.3})
        for (bool maximize : {false, true})
          for (double factor : {1.0, 0.25}) {
            Adam ours(size, type, at::ScalarType::Undefined);
            Adam reference = ours.clone();
            for (int step = 1; step <= 5; ++step) {
              const AdamWStep options{.lr = 3e-2,
                                      .beta1 = 0.8,
                                      .beta2 = 0.97,
                                      .eps = 1e-3,
                                      .weight_decay = decay,
                                      .step = step,
                                      .maximize = maximize};
              auto grad = random(size, type);
              ours.step(grad, options,
                        factor == 1 ? at::Tensor() : torch::full({}, factor, at::kFloat));
              reference.reference_step(grad, options, factor);
            }
            const double tolerance = 4 * epsilon(type);
            EXPECT_TRUE(near(ours.master, reference.master, tolerance, tolerance)) << type << size;
            EXPECT_TRUE(near(ours.exp_avg, reference.exp_avg, tolerance, tolerance))
                << type << size;
            EXPECT_TRUE(near(ours.exp_avg_sq, reference.exp_avg_sq, tolerance, tolerance))
                << type << size;
          }
}

TEST(AdamWKernel, LateStepsAndTinyGradientsKeepTheirDigits) {
  Adam ours(1000, at::kFloat, at::ScalarType::Undefined);
  Adam reference = ours.clone();
  for (int64_t step : {1, 2, 1000, 1'000'000}) {
    auto grad = random(1000) * 1e-12;
    ours.step(grad, {.lr = 1e-3, .eps = 1e-15, .step = step});
    reference.reference_step(grad, {.lr = 1e-3, .eps = 1e-15, .step = step}, 1);
  }
  EXPECT_TRUE(near(ours.master, reference.master, 1e-6, 1e-6));
}

TEST(AdamWKernel, TheLowCopyIsTheMasterRounded) {
  for (auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (auto low : {at::kBFloat16, at::kHalf, at::kFloat})
      for (int64_t size : kSizes) {
        Adam adam(size, type, low);
        adam.step(random(size, type), {.lr = 1e-2});
        EXPECT_TRUE(same_bits(adam.low, adam.master.to(low))) << type << " " << low << " " << size;
      }
}

TEST(AdamWKernel, TheLowCopyRoundsEveryKindOfNumberAsLibTorchDoes) {
  const float max = std::numeric_limits<float>::max(), tiny = 1e-40f;
  std::vector<float> values = {0.0f,  -0.0f,    1.0f,     max,      -max,     tiny,
                               -tiny, 65504.0f, 65520.0f, INFINITY, -INFINITY};
  for (uint32_t bits = 0x3f800000; bits < 0x3f830000; bits += 0x1000)  // ties among them
    values.push_back(std::bit_cast<float>(bits));
  for (uint32_t bits : {0x7f7f7fffu, 0x7f7f8000u, 0x7f7fffffu, 0x00008000u, 0x00018000u})
    values.push_back(std::bit_cast<float>(bits));
  auto given = torch::tensor(values);
  for (auto low : {at::kBFloat16, at::kHalf}) {
    Adam adam(given.numel(), at::kFloat, low);
    adam.master.copy_(given);
    adam.step(at::zeros_like(given), {.lr = 0});
    EXPECT_TRUE(at::equal(adam.master, given));
    EXPECT_TRUE(same_bits(adam.low, given.to(low)));
    // Every NaN stays a NaN, even one that would round to infinity.
    auto nan = at::full({5}, std::bit_cast<float>(0x7f800001u));
    Adam lost(5, at::kFloat, low);
    lost.master.copy_(nan);
    lost.step(at::zeros_like(nan), {.lr = 0});
    EXPECT_TRUE(lost.low.isnan().all().item<bool>());
  }
}

TEST(AdamWKernel, TheGradientIsNotWritten) {
  auto grad = random(1000), before = grad.clone();
  Adam(1000, at::kFloat, at::kBFloat16).step(grad, {}, torch::full({}, 0.5f));
  EXPECT_TRUE(same_bits(grad, before));
}

TEST(AdamWKernel, CutsAndThreadsChangeNoBit) {
  for (auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const int64_t size = 100003;
    const auto grad = random(size, type);
    const AdamWStep options{.lr = 1e-2, .weight_decay = 0.1, .step = 3};
    const auto factor = torch::full({}, 0.7f);
    Adam start(size, type, at::kBFloat16);
    start.exp_avg = random(size, type);
    start.exp_avg_sq = random(size, type).abs();

    Adam whole = start.clone();
    {
      Threads one(1);
      whole.step(grad, options, factor);
    }
    for (const auto& cuts : std::vector<std::vector<int64_t>>{
             {}, {1}, {2, 3, 5, 8}, {16384}, {64, 50001, 50002, 100002}, {33333, 66667}}) {
      Threads several(3);
      Adam parts = start.clone();
      int64_t begin = 0;
      auto ends = cuts;
      ends.push_back(size);
      for (int64_t end : ends) {
        parts.part(begin, end).step(grad.slice(0, begin, end), options, factor);
        begin = end;
      }
      EXPECT_TRUE(same_bits(parts.master, whole.master));
      EXPECT_TRUE(same_bits(parts.exp_avg, whole.exp_avg));
      EXPECT_TRUE(same_bits(parts.exp_avg_sq, whole.exp_avg_sq));
      EXPECT_TRUE(same_bits(parts.low, whole.low));
    }
  }
}

TEST(AdamWKernel, TheOperatorsOfLibTorchGiveTheSame) {
  const auto factor = torch::full({}, 0.3f);
  for (bool maximize : {false, true}) {
    std::vector<AdamWTensors> both;
    std::vector<Adam> expected;
    const AdamWStep options{.lr = 1e-2, .weight_decay = 0.1, .step = 4, .maximize = maximize};
    for (int64_t size : {7, 1000, 100003}) {
      // Including one without a copy.
      Adam adam(size, at::kFloat, size == 7 ? at::ScalarType::Undefined : at::kBFloat16);
      auto grad = random(size);
      expected.push_back(adam.clone());
      expected.back().step(grad, options, factor);
      both.push_back({adam.master, grad, adam.exp_avg, adam.exp_avg_sq, adam.low});
    }
    aten::adamw(both, std::span(&options, 1), factor);
    for (size_t i = 0; i < both.size(); ++i) {
      EXPECT_TRUE(near(both[i].master, expected[i].master, 1e-6, 1e-7));
      EXPECT_TRUE(near(both[i].exp_avg_sq, expected[i].exp_avg_sq, 1e-6, 1e-7));
      if (both[i].low.defined()) {
        EXPECT_TRUE(same_bits(both[i].low, both[i].master.to(at::kBFloat16)));
      }
    }
  }
}

TEST(AdamWKernel, TensorsThatDoNotFitAreAnError) {
  Adam adam(10, at::kFloat, at::ScalarType::Undefined);
  EXPECT_THROW(adam.step(random(9), {}), Error);
  EXPECT_THROW(adam.step(random(10, at::kDouble), {}), Error);
  EXPECT_THROW(adam.step(random(20).slice(0, 0, 20, 2), {}), Error);
  adam.exp_avg = at::Tensor();
  EXPECT_THROW(adam.step(random(10), {}), Error);
}

// --- SGD ---

struct SGDCase {
  double momentum, dampening, decay;
  bool nesterov, maximize;
};

std::vector<SGDCase> sgd_cases() {
  std::vector<SGDCase> cases;
  for (double decay : {0.0, 0.1})
    for (bool maximize : {false, true}) {
      cases.push_back({0, 0, decay, false, maximize});
      cases.push_back({0.9, 0, decay, false, maximize});
      cases.push_back({0.9, 0.2, decay, false, maximize});
      cases.push_back({0.9, 0, decay, true, maximize});
    }
  return cases;
}

SGDStep sgd_step(const SGDCase& c, int step) {
  return {.lr = 0.05,
          .momentum = c.momentum,
          .dampening = c.dampening,
          .weight_decay = c.decay,
          .nesterov = c.nesterov,
          .first = step == 1,
          .maximize = c.maximize};
}

TEST(SGDKernel, EveryOptionEqualsTorchOptimOverManySteps) {
  for (int64_t size : kSizes)
    for (const auto& c : sgd_cases()) {
      auto master = random(size), low = at::zeros({size}, at::kBFloat16);
      // The buffer's old contents must not matter.
      auto buffer = c.momentum == 0 ? at::Tensor() : at::full({size}, NAN);
      auto theirs = master.clone().set_requires_grad(true);
      torch::optim::SGD optimizer({theirs}, torch::optim::SGDOptions(0.05)
                                                .momentum(c.momentum)
                                                .dampening(c.dampening)
                                                .weight_decay(c.decay)
                                                .nesterov(c.nesterov));
      for (int step = 1; step <= 8; ++step) {
        auto grad = random(size), before = grad.clone();
        theirs.mutable_grad() = (c.maximize ? -grad : grad) * 0.5;
        optimizer.step();
        sgd(master, grad, buffer, low, sgd_step(c, step), torch::full({}, 0.5f));
        ASSERT_TRUE(same_bits(grad, before));
      }
      EXPECT_TRUE(near(master, theirs.detach(), 2e-6, 2e-6)) << size;
      EXPECT_TRUE(same_bits(low, master.to(at::kBFloat16)));
    }
}

TEST(SGDKernel, CutsAndThreadsChangeNoBit) {
  for (const auto& c : sgd_cases())
    for (auto type : {at::kFloat, at::kDouble, at::kHalf}) {
      const int64_t size = 50021, cut = 20011;
      auto master = random(size, type), grad = random(size, type), buffer = random(size, type);
      auto low = at::zeros({size}, at::kBFloat16);
      auto master2 = master.clone(), buffer2 = buffer.clone(), low2 = low.clone();
      {
        Threads one(1);
        sgd(master, grad, buffer, low, sgd_step(c, 2), {});
      }
      Threads several(3);
      for (auto [begin, end] : {std::pair(int64_t{0}, cut), std::pair(cut, size)})
        sgd(master2.slice(0, begin, end), grad.slice(0, begin, end), buffer2.slice(0, begin, end),
            low2.slice(0, begin, end), sgd_step(c, 2), {});
      EXPECT_TRUE(same_bits(master, master2));
      EXPECT_TRUE(same_bits(buffer, buffer2));
      EXPECT_TRUE(same_bits(low, low2));
    }
}

TEST(SGDKernel, TheOperatorsOfLibTorchGiveTheSame) {
  for (const auto& c : sgd_cases())
    for (int step : {1, 2}) {
      auto master = random(1000), grad = random(1000), low = at::zeros({1000}, at::kHalf);
      auto buffer = c.momentum == 0 ? at::Tensor() : random(1000);
      const SGDTensors copy{master.clone(), grad.clone(),
                            buffer.defined() ? buffer.clone() : at::Tensor(), low.clone()};
      sgd(master, grad, buffer, low, sgd_step(c, step), torch::full({}, 0.3f));
      const SGDStep options = sgd_step(c, step);
      aten::sgd(std::span(&copy, 1), std::span(&options, 1), torch::full({}, 0.3f));
      EXPECT_TRUE(near(copy.master, master, 1e-6, 1e-6));
      EXPECT_TRUE(near(copy.low, low, 2e-3, 1e-6));
      if (buffer.defined()) {
        EXPECT_TRUE(near(copy.momentum_buffer, buffer, 1e-6, 1e-6));
      }
    }
}

// --- sums and counts ---

double reference_sum(const at::Tensor& tensor, double p) {
  auto values = tensor.to(at::kDouble).abs();
  if (tensor.numel() == 0) return 0;
  return std::isinf(p) ? values.max().item<double>() : values.pow(p).sum().item<double>();
}

TEST(SumOfPowers, EqualsADoubleReference) {
  for (auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (int64_t size : kSizes)
      for (double p : {2.0, 1.0, 3.0, 0.5, kInfinity}) {
        auto tensor = random(size, type);
        auto sum = sum_of_powers(tensor, p);
        ASSERT_EQ(sum.scalar_type(), at::kDouble);
        ASSERT_EQ(sum.dim(), 0);
        const double expected = reference_sum(tensor, p);
        EXPECT_NEAR(sum.item<double>(), expected, 1e-12 * expected) << type << size << " " << p;
        EXPECT_NEAR(aten::sum_of_powers(tensor, p).item<double>(), expected, 2e-5 * expected);
      }
}

TEST(SumOfPowers, RoundedToFloatItDoesNotDependOnCuts) {
  for (int trial = 0; trial < 20; ++trial) {
    const int64_t size = 100003 + trial;
    auto tensor = random(size) * std::pow(10.0, trial - 10);
    for (double p : {2.0, 1.0, kInfinity}) {
      const double whole = sum_of_powers(tensor, p).item<double>();
      for (int64_t parts : {2, 3, 7, 64}) {
        double sum = 0;
        for (int64_t i = 0; i < parts; ++i) {
          auto part = tensor.slice(0, size * i / parts, size * (i + 1) / parts);
          const double value = sum_of_powers(part, p).item<double>();
          sum = std::isinf(p) ? std::max(sum, value) : sum + value;
        }
        EXPECT_EQ(static_cast<float>(sum), static_cast<float>(whole)) << p << " " << parts;
      }
    }
  }
}

TEST(SumOfPowers, HasTheSameBitsForAnyNumberOfThreads) {
  auto tensor = random(1'000'003);
  for (double p : {2.0, 1.0, 3.0, kInfinity}) {
    std::set<double> values;
    for (int threads : {1, 2, 3, 5}) {
      Threads some(threads);
      values.insert(sum_of_powers(tensor, p).item<double>());
    }
    EXPECT_EQ(values.size(), 1u) << p;
  }
}

TEST(SumOfPowers, SumsOfLargeValuesDoNotOverflow) {
  auto tensor = at::full({1000}, 1e30f);
  EXPECT_NEAR(sum_of_powers(tensor, 2).item<double>(), 1e63, 1e56);
}

TEST(SumOfPowers, InfinitiesAndNaNComeThrough) {
  for (double p : {2.0, 1.0, 3.0, kInfinity})
    for (int64_t where : {0, 3, 500, 40000, 99999}) {
      auto tensor = random(100000);
      tensor[where] = -INFINITY;
      EXPECT_EQ(sum_of_powers(tensor, p).item<double>(), kInfinity);
      EXPECT_EQ(aten::sum_of_powers(tensor, p).item<double>(), kInfinity);
      tensor[(where + 17) % 100000] = NAN;
      EXPECT_TRUE(std::isnan(sum_of_powers(tensor, p).item<double>())) << p << " " << where;
      EXPECT_TRUE(std::isnan(aten::sum_of_powers(tensor, p).item<double>())) << p << " " << where;
    }
}

TEST(SumOfPowers, APowerThatIsNotPositiveIsAnError) {
  for (double p : {0.0, -1.0, -kInfinity, std::nan("")})
    EXPECT_THROW(sum_of_powers(random(3), p), Error);
  EXPECT_THROW(sum_of_powers(at::ones({3}, at::kLong), 2), Error);
}

TEST(CountNotFinite, CountsInfinitiesAndNaN) {
  for (auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (int64_t size : kSizes) {
      auto tensor = random(size, type);
      EXPECT_EQ(count_not_finite(tensor).item<double>(), 0) << type << size;
      EXPECT_EQ(aten::count_not_finite(tensor).item<double>(), 0) << type << size;
      if (size < 7) continue;
      tensor[0] = INFINITY, tensor[size / 2] = NAN, tensor[size - 1] = -INFINITY;
      EXPECT_EQ(count_not_finite(tensor).item<double>(), 3) << type << size;
      EXPECT_GT(aten::count_not_finite(tensor).item<double>(), 0) << type << size;
    }
}

TEST(CountNotFinite, TheLargestNumbersAreFinite) {
  EXPECT_EQ(count_not_finite(at::full({9}, std::numeric_limits<float>::max())).item<double>(), 0);
  EXPECT_EQ(count_not_finite(at::full({9}, -65504, at::kHalf)).item<double>(), 0);
  EXPECT_EQ(count_not_finite(at::full({9}, 1e-42f)).item<double>(), 0);
}

// --- threads and devices ---

TEST(Parallel, TakesEveryChunkOnceOnLibTorchsThreads) {
  Threads several(2);
  const int64_t count = 10 * cpu::kChunk + 5;
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::thread::id> threads;
  std::vector<std::pair<int64_t, int64_t>> taken(cpu::chunks(count));
  cpu::parallel(count, [&](int64_t chunk, int64_t begin, int64_t end) {
    std::unique_lock lock(mutex);
    EXPECT_EQ(taken.at(chunk), std::pair(int64_t{0}, int64_t{0}));
    taken[chunk] = {begin, end};
    threads.insert(std::this_thread::get_id());
    changed.notify_all();
    // A quick thread would take all of them before the other has begun.
    changed.wait_for(lock, std::chrono::seconds(30), [&] { return threads.size() > 1; });
  });
  for (int64_t i = 0; i < static_cast<int64_t>(taken.size()); ++i)
    EXPECT_EQ(taken[i], std::pair(i * cpu::kChunk, std::min(count, (i + 1) * cpu::kChunk)));
  EXPECT_EQ(threads.size(), 2u);
}

TEST(Gpu, GivesWhatTheCpuGives) {
  comm::find_module("cuda");  // loads LibTorch's CUDA library
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  const auto gpu = at::Device(at::kCUDA);
  const auto to_gpu = [&](const at::Tensor& t) { return t.defined() ? t.to(gpu) : t; };
  for (int64_t size : {1, 1000, 100003})
    for (bool with_factor : {false, true}) {
      const auto factor = with_factor ? torch::full({}, 0.3f) : at::Tensor();
      Adam adam(size, at::kFloat, at::kBFloat16), moved = adam.clone();
      for (auto* t : {&moved.master, &moved.exp_avg, &moved.exp_avg_sq, &moved.low})
        *t = t->to(gpu);
      auto weights = random(size), buffer = random(size);
      auto moved_weights = weights.to(gpu), moved_buffer = buffer.to(gpu);
      for (int step = 1; step <= 5; ++step) {
        auto grad = random(size), moved_grad = grad.to(gpu);
        adam.step(grad, {.lr = 1e-2, .weight_decay = 0.1, .step = step}, factor);
        moved.step(moved_grad, {.lr = 1e-2, .weight_decay = 0.1, .step = step}, to_gpu(factor));
        EXPECT_TRUE(same_bits(moved_grad.cpu(), grad));  // it was only read
        const SGDStep sgd_options{.lr = 0.1, .momentum = 0.9, .first = step == 1};
        sgd(weights, grad, buffer, {}, sgd_options, factor);
        sgd(moved_weights, moved_grad, moved_buffer, {}, sgd_options, to_gpu(factor));
      }
      EXPECT_TRUE(near(moved.master.cpu(), adam.master, 1e-6, 1e-6));
      EXPECT_TRUE(same_bits(moved.low.cpu(), moved.master.cpu().to(at::kBFloat16)));
      EXPECT_TRUE(near(moved_weights.cpu(), weights, 1e-6, 1e-6));
      for (double p : {2.0, 1.0, 3.0, kInfinity}) {
        const double expected = reference_sum(weights, p);
        auto sum = sum_of_powers(weights.to(gpu), p);
        EXPECT_TRUE(sum.is_cuda());
        EXPECT_NEAR(sum.item<double>(), expected, 1e-6 * expected);
      }
      auto broken = weights.to(gpu);
      EXPECT_EQ(count_not_finite(broken).item<double>(), 0);
      broken[size - 1] = NAN;
      EXPECT_GT(count_not_finite(broken).item<double>(), 0);
    }
}

}  // namespace
}  // namespace fsdp::kernels
