// RMSNorm and LayerNorm against their formulas in float64 and the gradients that autograd gives.
#include <torch/autograd.h>

#include <cmath>

#include "fsdp/error.h"
#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

class Norms : public OnDevice {};
FSDP_ON_EVERY_DEVICE(Norms);

const double kEps = 1e-5;
const std::vector<int64_t> kSizes[] = {{0, 8},    {1, 1},    {3, 1},    {2, 7},       {5, 33},
                                       {2, 3, 5}, {64, 384}, {17, 128}, {130, 257},   {1000, 9},
                                       {3, 2048}, {2, 8192}, {3, 5001}, {2, 3, 4, 16}};

// One case. Tensors that aren't wanted are undefined.
struct Case {
  bool centred;  // LayerNorm
  at::Tensor x, residual, weight, bias, grad, grad_sum;
  at::Tensor grad_weight, grad_bias;  // written to
  bool accumulate = false;
};

Normed forward(const Case& c) {
  return c.centred ? layer_norm(c.x, c.residual, c.weight, c.bias, kEps)
                   : rms_norm(c.x, c.residual, c.weight, kEps);
}

NormGradients backward(const Case& c, const Normed& made, bool want_out = true) {
  const auto x = c.residual.defined() ? made.sum : c.x;
  return c.centred ? layer_norm_backward(c.grad, c.grad_sum, x, made.mean, made.rstd, c.weight,
                                         c.bias, c.grad_weight, c.grad_bias, c.accumulate, want_out)
                   : rms_norm_backward(c.grad, c.grad_sum, x, made.rstd, c.weight, c.grad_weight,
                                       c.accumulate, want_out);
}

struct Reference {
  at::Tensor out, mean, rstd, grad_x, grad_weight, grad_bias;
};

Reference reference(const Case& c) {
  const auto x = exact(c.residual.defined() ? c.x + c.residual : c.x);
  const auto weight = exact(c.weight);
  const auto bias = c.bias.defined() ? exact(c.bias) : at::zeros_like(weight).requires_grad_();
  const auto mean = c.centred ? x.mean(-1, true) : x.new_zeros({1});
  const auto centred = x - mean;
  const auto rstd = (centred.square().mean(-1, true) + kEps).rsqrt();
  const auto out = centred * rstd * weight + bias;
  auto total = (out * exact(c.grad)).sum();
  if (c.grad_sum.defined()) total = total + (x * exact(c.grad_sum)).sum();
  const auto grads = torch::autograd::grad({total}, {x, weight, bias});
  return {
      out,     c.centred ? mean.squeeze(-1) : at::Tensor(), rstd.squeeze(-1), grads[0], grads[1],
      grads[2]};
}

// The sums over rows have float32's error in their terms.
double terms(const Case& c) {
  return 1 + std::sqrt(static_cast<double>(c.x.numel() / c.x.size(-1)));
}

void expect_right(const Case& c) {
  const at::Tensor weight_before =
      c.grad_weight.defined() ? c.grad_weight.to(at::kCPU, at::kDouble).clone() : at::Tensor();
  const at::Tensor bias_before =
      c.grad_bias.defined() ? c.grad_bias.to(at::kCPU, at::kDouble).clone() : at::Tensor();
  const auto expected = reference(c);

  const Normed made = forward(c);
  EXPECT_TRUE(near(made.out, expected.out));
  EXPECT_TRUE(near(made.rstd.flatten(), expected.rstd.flatten()));
  EXPECT_EQ(made.mean.defined(), c.centred);
  if (c.centred) {
    EXPECT_TRUE(near(made.mean.flatten(), expected.mean.flatten()));
  }
  const auto sum = c.residual.defined() ? c.x + c.residual : at::empty({0}, c.x.options());
  EXPECT_TRUE(same_bits(made.sum, sum));

  // Gradients are multiplied by rstd, and so are their errors.
  const double rstd = expected.rstd.numel() > 0 ? expected.rstd.max().item<double>() : 1;
  const NormGradients grads = backward(c, made);
  EXPECT_TRUE(near(grads.x, expected.grad_x, 1 + rstd));
  EXPECT_TRUE(same_bits(grads.out, made.out));
  if (c.grad_weight.defined()) {
    const auto before = c.accumulate ? weight_before : at::zeros_like(weight_before);
    EXPECT_TRUE(near(c.grad_weight, before + expected.grad_weight, terms(c)));
  }
  if (c.grad_bias.defined()) {
    const auto before = c.accumulate ? bias_before : at::zeros_like(bias_before);
    EXPECT_TRUE(near(c.grad_bias, before + expected.grad_bias, terms(c)));
  }
}

TEST_P(Norms, AreRightForwardAndBackwardForEveryShapeAndDtype) {
  for (bool centred : {false, true})
    for (auto type : kDtypes)
      for (const auto& sizes : kSizes) {
        SCOPED_TRACE((centred ? "layer_norm " : "rms_norm ") + describe(at::empty(sizes, type)));
        const int64_t dim = sizes.back();
        expect_right({.centred = centred,
                      .x = random(sizes, type),
                      .weight = random({dim}, type),
                      .bias = centred ? random({dim}, type) : at::Tensor(),
                      .grad = random(sizes, type),
                      .grad_weight = random({dim}),
                      .grad_bias = centred ? random({dim}) : at::Tensor()});
      }
}

TEST_P(Norms, AddAResidualAndItsGradientOnTheWay) {
  for (bool centred : {false, true})
    for (auto type : kDtypes)
      for (const auto& sizes : kSizes) {
        SCOPED_TRACE((centred ? "layer_norm " : "rms_norm ") + describe(at::empty(sizes, type)));
        const int64_t dim = sizes.back();
        expect_right({.centred = centred,
                      .x = random(sizes, type),
                      .residual = random(sizes, type),
                      .weight = random({dim}, type),
                      .grad = random(sizes, type),
                      .grad_sum = random(sizes, type),
                      .grad_weight = random({dim}, type)});
      }
}

TEST_P(Norms, AddToGradientsOfAnyDtype) {
  for (bool centred : {false, true})
    for (auto type : kDtypes)
      for (auto gradient : kDtypes)
        for (bool accumulate : {false, true}) {
          SCOPED_TRACE(::testing::Message() << centred << " " << type << " into " << gradient
                                            << " accumulate " << accumulate);
          expect_right({.centred = centred,
                        .x = random({37, 72}, type),
                        .weight = random({72}, type),
                        .bias = centred ? random({72}, type) : at::Tensor(),
                        .grad = random({37, 72}, type),
                        .grad_weight = random({72}, gradient),
                        .grad_bias = centred ? random({72}, gradient) : at::Tensor(),
                        .accumulate = accumulate});
        }
}

TEST_P(Norms, TakeMemoryThatIsNotAligned) {
  for (bool centred : {false, true})
    for (auto type : kDtypes)
      expect_right({.centred = centred,
                    .x = unaligned(random({5, 64}, type)),
                    .residual = unaligned(random({5, 64}, type)),
                    .weight = unaligned(random({64}, type)),
                    .bias = centred ? unaligned(random({64}, type)) : at::Tensor(),
                    .grad = unaligned(random({5, 64}, type)),
                    .grad_sum = unaligned(random({5, 64}, type)),
                    .grad_weight = unaligned(random({64}, type)),
                    .grad_bias = centred ? unaligned(random({64}, type)) : at::Tensor()});
}

TEST_P(Norms, LeaveOutWhatIsNotWanted) {
  for (bool centred : {false, true}) {
    const Case c{
        .centred = centred, .x = random({4, 16}), .weight = random({16}), .grad = random({4, 16})};
    expect_right(c);
    const auto made = forward(c);
    EXPECT_EQ(backward(c, made, /*want_out=*/false).out.sizes(), at::IntArrayRef({0}));
  }
}

TEST_P(Norms, KeepRowsThatAreFarFromZero) {
  // LayerNorm's variance is small compared with the mean: a difference of squares would lose it.
  const auto x = random({6, 300}) + 1000;
  const Case c{.centred = true, .x = x, .weight = random({300}), .grad = random({6, 300})};
  const auto expected = reference(c);
  EXPECT_TRUE(near(forward(c).out, expected.out, 500));  // x - mean has an error of 3e-4
}

TEST_P(Norms, GiveTheSameBitsAlways) {
  for (bool centred : {false, true})
    for (auto type : kDtypes) {
      Case c{.centred = centred,
             .x = random({1111, 200}, type),
             .residual = random({1111, 200}, type),
             .weight = random({200}, type),
             .bias = centred ? random({200}, type) : at::Tensor(),
             .grad = random({1111, 200}, type),
             .grad_sum = random({1111, 200}, type)};
      expect_same_bits_always([&]() -> std::vector<at::Tensor> {
        c.grad_weight = zeros({200}, at::kFloat);
        c.grad_bias = centred ? zeros({200}, at::kFloat) : at::Tensor();
        const auto made = forward(c);
        const auto grads = backward(c, made);
        return {made.out,
                made.sum,
                made.rstd,
                grads.x,
                grads.out,
                c.grad_weight,
                centred ? c.grad_bias : c.grad_weight};
      });
    }
}

TEST(NormsOnCpu, ComputeInFloat64OnTheCpu) {
  torch::manual_seed(3);
  const auto random = [](at::IntArrayRef sizes) { return torch::randn(sizes, at::kDouble); };
  for (bool centred : {false, true})
    expect_right({.centred = centred,
                  .x = random({9, 21}),
                  .residual = random({9, 21}),
                  .weight = random({21}),
                  .bias = centred ? random({21}) : at::Tensor(),
                  .grad = random({9, 21}),
                  .grad_sum = random({9, 21}),
                  .grad_weight = random({21}),
                  .grad_bias = centred ? random({21}) : at::Tensor(),
                  .accumulate = true});
}

}  // namespace
}  // namespace fsdp::kernels
