// AdamW in every register width that this CPU has: it matches a reference in float64, and all
// widths give the same bits.
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>
#include <vector>

#include "fsdp/error.h"
#include "kernels/cpu/widths.h"
#include "kernels/split.h"
#include "kernels/testing.h"
#include "kernels/update.h"

namespace fsdp::kernels {
namespace {

// Around lanes of 4, 8 and 16, lines of 32, blocks of 1024 and chunks of 4096.
const int64_t kWidths[] = {0, 1, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 95, 96, 1000, 4099, 10007};
constexpr int64_t kFrame = 64;  // elements around each array that must not be written

enum class Master { kWhole, kWithCopy, kWithHalfCopy, kSplit };
const Master kMasters[] = {Master::kWhole, Master::kWithCopy, Master::kWithHalfCopy,
                           Master::kSplit};

const AdamWStep kStep{
    .lr = 3e-2, .beta1 = 0.8, .beta2 = 0.97, .eps = 1e-6, .weight_decay = 0.3, .step = 3};

// The arrays of an update, each in the middle of a larger one.
struct Arrays {
  std::vector<at::Tensor> whole;
  int64_t size = 0;
  Master kind = Master::kWhole;

  enum Place { kMaster, kGrad, kExpAvg, kExpAvgSq, kLow, kRest };

  at::Tensor at(Place place) const {
    const at::Tensor& found = whole[place];
    return found.defined() ? found.narrow(0, kFrame, size) : found;
  }
  at::Tensor master() const {
    return kind == Master::kSplit ? join_float(at(kLow), at(kRest)) : at(kMaster);
  }
  AdamWTensors tensors() const {
    AdamWTensors t{at(kMaster), whole[kGrad], at(kExpAvg), at(kExpAvgSq), at(kLow), at(kRest)};
    t.grad_begin = kFrame;
    return t;
  }
  Arrays clone() const {
    Arrays copy = *this;
    for (auto& tensor : copy.whole)
      if (tensor.defined()) tensor = tensor.clone();
    return copy;
  }
  void update(float factor, int width) const { cpu::adamw(tensors(), kStep, factor, width); }
};

Arrays make(int64_t size, Master kind, at::ScalarType grad) {
  const int64_t length = size + 2 * kFrame;
  const auto random = [&] { return torch::randn({length}, at::kFloat); };
  Arrays made{.size = size, .kind = kind};
  const at::Tensor master = random();
  made.whole = {master, random().to(grad), random(), random().abs(), {}, {}};
  if (kind == Master::kWithCopy)
    made.whole[Arrays::kLow] = torch::full({length}, 77, at::kBFloat16);
  if (kind == Master::kWithHalfCopy)
    made.whole[Arrays::kLow] = torch::full({length}, 77, at::kHalf);
  if (kind == Master::kSplit) {
    made.whole[Arrays::kLow] = torch::empty({length}, at::kBFloat16);
    made.whole[Arrays::kRest] = torch::empty({length}, at::kShort);
    split_float(master, made.whole[Arrays::kLow], made.whole[Arrays::kRest]);
    made.whole[Arrays::kMaster] = at::Tensor();
  }
  return made;
}

template <typename Body>
void for_every_case(const Body& body) {
  torch::manual_seed(11);
  for (const int64_t size : kWidths)
    for (const Master kind : kMasters)
      for (const auto grad : {at::kFloat, at::kBFloat16}) {
        SCOPED_TRACE("size " + std::to_string(size) + ", master " +
                     std::to_string(static_cast<int>(kind)) + ", gradient " + toString(grad));
        body(make(size, kind, grad));
      }
}

TEST(Widths, EachIsTheReferenceInDouble) {
  for_every_case([](const Arrays& given) {
    const auto wide = [&](const at::Tensor& t) { return t.to(at::kDouble); };
    const auto g = wide(given.at(Arrays::kGrad)) * 0.25;
    const auto m = wide(given.at(Arrays::kExpAvg)) * kStep.beta1 + g * (1 - kStep.beta1);
    const auto v = wide(given.at(Arrays::kExpAvgSq)) * kStep.beta2 + g * g * (1 - kStep.beta2);
    const auto m_hat = m / (1 - std::pow(kStep.beta1, kStep.step));
    const auto v_hat = v / (1 - std::pow(kStep.beta2, kStep.step));
    const auto w = wide(given.master()) * (1 - kStep.lr * kStep.weight_decay) -
                   kStep.lr * m_hat / (v_hat.sqrt() + kStep.eps);
    for (const int width : cpu::widths()) {
      const Arrays ours = given.clone();
      ours.update(0.25f, width);
      EXPECT_TRUE(at::allclose(wide(ours.master()), w, 1e-6, 1e-6)) << width;
      EXPECT_TRUE(at::allclose(wide(ours.at(Arrays::kExpAvg)), m, 1e-6, 1e-6)) << width;
      EXPECT_TRUE(at::allclose(wide(ours.at(Arrays::kExpAvgSq)), v, 1e-6, 1e-6)) << width;
      if (given.kind == Master::kWithCopy || given.kind == Master::kWithHalfCopy) {
        const auto low = ours.at(Arrays::kLow);
        EXPECT_TRUE(same_bits(low, ours.master().to(low.scalar_type()))) << width;
      }
    }
  });
}

TEST(Widths, AllGiveTheSameBitsAndWriteNothingBeside) {
  for_every_case([](const Arrays& given) {
    std::vector<Arrays> updated;
    for (const int width : cpu::widths()) {
      const Arrays ours = updated.emplace_back(given.clone());
      ours.update(0.7f, width);
      for (size_t i = 0; i < ours.whole.size(); ++i) {
        if (!ours.whole[i].defined()) continue;
        EXPECT_TRUE(same_bits(ours.whole[i], updated.front().whole[i])) << width << " " << i;
        const auto end = kFrame + given.size;
        for (const auto& [from, to] : {std::pair(int64_t{0}, kFrame), {end, end + kFrame}})
          EXPECT_TRUE(
              same_bits(ours.whole[i].slice(0, from, to), given.whole[i].slice(0, from, to)))
              << width << " " << i;
      }
    }
  });
}

TEST(Widths, ACutAnywhereChangesNoBit) {
  torch::manual_seed(12);
  for (const Master kind : kMasters) {
    const Arrays given = make(2000, kind, at::kBFloat16);
    for (const int width : cpu::widths()) {
      const Arrays whole = given.clone();
      whole.update(1, width);
      for (const int64_t cut : {1, 31, 32, 33, 999, 1999}) {
        const Arrays parts = given.clone();
        for (const auto& [from, to] : {std::pair(int64_t{0}, cut), {cut, given.size}}) {
          AdamWTensors part = parts.tensors();
          for (auto* t : {&part.master, &part.exp_avg, &part.exp_avg_sq, &part.low, &part.rest})
            if (t->defined()) *t = t->slice(0, from, to);
          part.grad_begin += from;
          cpu::adamw(part, kStep, 1, width);
        }
        for (size_t i = 0; i < whole.whole.size(); ++i) {
          if (!whole.whole[i].defined()) continue;
          EXPECT_TRUE(same_bits(whole.whole[i], parts.whole[i])) << width << " " << cut << " " << i;
        }
      }
    }
  }
}

TEST(Widths, WhatIsNotFiniteStaysSo) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  torch::manual_seed(13);
  for (const Master kind : kMasters)
    for (const int width : cpu::widths()) {
      const Arrays ours = make(100, kind, at::kFloat);
      for (int64_t i = 0; i < 100; i += 10) ours.at(Arrays::kGrad)[i] = i % 20 ? inf : nan;
      ours.update(1, width);
      const auto bad = ours.master().isfinite().logical_not();
      for (int64_t i = 0; i < 100; ++i)
        EXPECT_EQ(bad[i].item<bool>(), i % 10 == 0) << width << " " << i;
    }
}

TEST(Widths, TheWidestIsUsedUnlessAnotherIsAskedFor) {
  ASSERT_FALSE(cpu::widths().empty());
  EXPECT_EQ(cpu::widths().front(), 16);
  EXPECT_EQ(cpu::choose_width(std::nullopt, {16, 32, 64}), 64);
  EXPECT_EQ(cpu::choose_width(32, {16, 32, 64}), 32);
  for (const int64_t asked : {0, 24, 64}) {
    try {
      cpu::choose_width(asked, {16, 32});
      ADD_FAILURE() << asked << " was accepted";
    } catch (const Error& error) {
      const std::string said = error.what();
      EXPECT_NE(said.find("FSDP_CPU_WIDTH=" + std::to_string(asked)), std::string::npos) << said;
      EXPECT_NE(said.find("16, 32"), std::string::npos) << said;
    }
  }
}

}  // namespace
}  // namespace fsdp::kernels
