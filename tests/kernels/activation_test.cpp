// SwiGLU and GELU against their formulas in float64 and the gradients that autograd gives.
#include <torch/autograd.h>

#include <cmath>

#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

class Activations : public OnDevice {
 protected:
  // Values of every magnitude, with both signs.
  at::Tensor wide(at::IntArrayRef sizes, at::ScalarType type) const {
    const auto size = torch::randn(sizes, at::kDouble);
    return here((torch::randn(sizes, at::kDouble) * size.exp() * 2).clamp(-60, 60).to(type));
  }
};
FSDP_ON_EVERY_DEVICE(Activations);

const std::vector<int64_t> kActivationSizes[] = {{0, 6},  {1, 1},   {3, 5},     {2, 3, 7},
                                       {9, 64}, {33, 96}, {70, 1000}, {2, 8191}};

at::Tensor plain_swiglu(const at::Tensor& gate_up) {
  const auto halves = gate_up.chunk(2, -1);
  return halves[0] * halves[0].sigmoid() * halves[1];
}

at::Tensor plain_gelu(const at::Tensor& x, bool tanh) {
  if (!tanh) return x * 0.5 * at::special_erfc(-x * M_SQRT1_2);
  return x * 0.5 * (1 + ((x + 0.044715 * x * x * x) * std::sqrt(2 / M_PI)).tanh());
}

TEST_P(Activations, SwigluIsRightForwardAndBackward) {
  for (auto type : kDtypes)
    for (auto sizes : kActivationSizes) {
      SCOPED_TRACE(describe(at::empty(sizes, type)));
      const auto grad = random(sizes, type);
      sizes.back() *= 2;
      const auto gate_up = wide(sizes, type);
      const auto x = exact(gate_up), expected = plain_swiglu(x);
      const auto expected_grad = torch::autograd::grad({(expected * exact(grad)).sum()}, {x})[0];

      const auto out = swiglu(gate_up);
      EXPECT_TRUE(near(out, expected));
      const auto [made, again] = swiglu_backward(grad, gate_up, true);
      EXPECT_TRUE(near(made, expected_grad));
      EXPECT_TRUE(same_bits(again, out));
      const auto [alone, nothing] = swiglu_backward(grad, gate_up, false);
      EXPECT_TRUE(same_bits(alone, made));
      EXPECT_EQ(nothing.sizes(), at::IntArrayRef({0}));
    }
}

TEST_P(Activations, GeluIsRightForwardAndBackward) {
  for (bool tanh : {false, true})
    for (auto type : kDtypes)
      for (const auto& sizes : kActivationSizes) {
        SCOPED_TRACE((tanh ? "tanh " : "erf ") + describe(at::empty(sizes, type)));
        const auto x = wide(sizes, type), grad = random(sizes, type);
        const auto leaf = exact(x), expected = plain_gelu(leaf, tanh);
        const auto expected_grad =
            torch::autograd::grad({(expected * exact(grad)).sum()}, {leaf})[0];

        const auto out = gelu(x, tanh);
        EXPECT_TRUE(near(out, expected));
        const auto [made, again] = gelu_backward(grad, x, tanh, true);
        EXPECT_TRUE(near(made, expected_grad));
        EXPECT_TRUE(same_bits(again, out));
        const auto [alone, nothing] = gelu_backward(grad, x, tanh, false);
        EXPECT_TRUE(same_bits(alone, made));
        EXPECT_EQ(nothing.sizes(), at::IntArrayRef({0}));
      }
}

TEST_P(Activations, HoldAtTheEnds) {
  // Far from 0 an activation is 0 or its input, and nothing overflows on the way.
  const auto ends = here(at::tensor({-1e12, -1000.0, -200.0, 200.0, 1000.0, 1e12}, at::kDouble));
  const auto x = ends.to(at::kFloat), ones = at::ones_like(x);
  const auto straight = x.clamp_min(0);
  const auto slope = (x > 0).to(at::kFloat);
  for (bool tanh : {false, true}) {
    EXPECT_TRUE(at::equal(gelu(x, tanh), straight)) << gelu(x, tanh);
    const auto made = std::get<0>(gelu_backward(ones, x, tanh, false));
    EXPECT_TRUE(at::equal(made, slope)) << made;
  }
  const auto gate_up = at::cat({x, ones});
  EXPECT_TRUE(at::equal(swiglu(gate_up), straight)) << swiglu(gate_up);
  const auto made = std::get<0>(swiglu_backward(ones, gate_up, false));
  EXPECT_TRUE(at::equal(made, at::cat({slope, straight}))) << made;
}

TEST_P(Activations, PassNanOn) {
  const auto x = here(at::full({9}, std::nan("")));
  for (bool tanh : {false, true}) EXPECT_TRUE(gelu(x, tanh).isnan().all().item<bool>());
  const auto gate_up = here(at::full({10}, std::nan("")));
  EXPECT_TRUE(swiglu(gate_up).isnan().all().item<bool>());
}

TEST_P(Activations, TakeMemoryThatIsNotAligned) {
  for (auto type : kDtypes) {
    const auto gate_up = random({6, 64}, type), grad = random({6, 32}, type);
    EXPECT_TRUE(same_bits(swiglu(unaligned(gate_up)), swiglu(gate_up)));
    EXPECT_TRUE(same_bits(std::get<0>(swiglu_backward(unaligned(grad), unaligned(gate_up), true)),
                          std::get<0>(swiglu_backward(grad, gate_up, true))));
    EXPECT_TRUE(same_bits(gelu(unaligned(grad), true), gelu(grad, true)));
  }
}

TEST_P(Activations, GiveTheSameBitsAlways) {
  for (auto type : kDtypes) {
    const auto gate_up = random({1111, 202}, type), grad = random({1111, 101}, type);
    expect_same_bits_always([&]() -> std::vector<at::Tensor> {
      const auto [a, b] = swiglu_backward(grad, gate_up, true);
      const auto [c, d] = gelu_backward(grad, grad, false, true);
      return {swiglu(gate_up), gelu(grad, true), a, b, c, d};
    });
  }
}

TEST(ActivationsOnCpu, ComputeInFloat64) {
  torch::manual_seed(3);
  const auto x = torch::randn({7, 10}, at::kDouble).requires_grad_();
  const auto grad = torch::randn({7, 5}, at::kDouble);
  const auto expected = plain_swiglu(x);
  EXPECT_TRUE(near(swiglu(x.detach()), expected));
  EXPECT_TRUE(near(std::get<0>(swiglu_backward(grad, x.detach(), false)),
                   torch::autograd::grad({(expected * grad).sum()}, {x})[0]));
  for (bool tanh : {false, true}) {
    const auto curve = plain_gelu(x, tanh);
    EXPECT_TRUE(near(gelu(x.detach(), tanh), curve));
    EXPECT_TRUE(near(std::get<0>(gelu_backward(x.detach(), x.detach(), tanh, false)),
                     torch::autograd::grad({(curve * x.detach()).sum()}, {x})[0]));
  }
}

}  // namespace
}  // namespace fsdp::kernels
