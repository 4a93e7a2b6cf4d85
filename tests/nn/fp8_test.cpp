// Linears in fp8: against products of the restored numbers in float64, what backward keeps, and
// which linears are converted.
#include "fsdp/nn/fp8.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include "fsdp/error.h"
#include "fsdp/nn.h"
#include "kernels/fp8.h"
#include "nn/testing.h"
#include "shard/counting_allocator.h"

namespace fsdp::nn {
namespace {

using kernels::fp8::Scaling;

struct Fp8Case {
  const char* name;
  Fp8 recipe;
  at::DeviceType device;
};

class Fp8Layers : public ::testing::TestWithParam<Fp8Case> {
 protected:
  void SetUp() override {
    if (GetParam().device == at::kCUDA && !has_cuda()) GTEST_SKIP() << "needs a GPU";
    torch::manual_seed(11);
  }
  Fp8 recipe() const { return GetParam().recipe; }
  bool bf16_grad() const { return recipe() == Fp8::kRowwiseBf16Grad; }
  at::Tensor leaf(at::IntArrayRef sizes, double size = 1) const {
    const auto made = (at::randn(sizes) * size).to(GetParam().device, at::kBFloat16);
    return made.requires_grad_();
  }

  // The matrix as its bytes have it: the copy that is multiplied along rows, or along columns.
  at::Tensor rounded(const at::Tensor& matrix, bool along_columns) const {
    const auto scaling = recipe() == Fp8::kTensorwise ? Scaling::kTensorwise : Scaling::kRowwise;
    const auto whole = matrix.detach().contiguous().view({-1, matrix.size(-1)}).cpu();
    const auto both = kernels::fp8::quantise(whole, scaling, {true, true});
    const auto& copy = along_columns ? both.columns : both.rows;
    const auto numbers =
        copy.data.to(at::kFloat).to(at::kDouble) * copy.factors.to(at::kDouble).view({-1, 1});
    return along_columns ? numbers.t() : numbers;
  }
  at::Tensor exact(const at::Tensor& tensor) const {
    return tensor.detach().cpu().to(at::kDouble).reshape({-1, tensor.size(-1)});
  }
  void expect_near(const at::Tensor& made, const at::Tensor& expected, double tolerance = 1e-2) {
    const auto difference = exact(made) - expected;
    EXPECT_LE(difference.norm().item<double>(), tolerance * expected.norm().item<double>());
  }

  // y = x · weightsᵀ and its gradients, each from the copies that it multiplies. grad_x may be
  // undefined.
  void expect_right(const at::Tensor& y, const at::Tensor& grad, const at::Tensor& x,
                    const at::Tensor& grad_x, const at::Tensor& weights,
                    const at::Tensor& grad_weights) {
    expect_near(y, rounded(x, false).matmul(rounded(weights, false).t()));
    if (grad_x.defined()) expect_near(grad_x, rounded(grad, false).matmul(rounded(weights, true)));
    if (bf16_grad())
      expect_near(grad_weights, exact(grad).t().matmul(exact(x)));
    else
      expect_near(grad_weights, rounded(grad, true).t().matmul(rounded(x, true)));
  }
};

INSTANTIATE_TEST_SUITE_P(
    Recipes, Fp8Layers,
    ::testing::Values(Fp8Case{"tensorwise_cpu", Fp8::kTensorwise, at::kCPU},
                      Fp8Case{"rowwise_cpu", Fp8::kRowwise, at::kCPU},
                      Fp8Case{"rowwise_bf16_grad_cpu", Fp8::kRowwiseBf16Grad, at::kCPU},
                      Fp8Case{"tensorwise_cuda", Fp8::kTensorwise, at::kCUDA},
                      Fp8Case{"rowwise_cuda", Fp8::kRowwise, at::kCUDA},
                      Fp8Case{"rowwise_bf16_grad_cuda", Fp8::kRowwiseBf16Grad, at::kCUDA}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(Fp8Layers, LinearMultipliesBytes) {
  const at::Tensor x = leaf({2, 24, 96}), weight = leaf({64, 96}, 0.1), bias = leaf({64}, 0.01);
  const at::Tensor y = linear(x, weight, bias, WeightLayout::kOutIn, recipe());
  const at::Tensor grad = leaf({2, 24, 64}).detach();
  y.backward(grad);
  expect_right(y - bias.detach(), grad, x, x.grad(), weight, weight.grad());
  expect_near(bias.grad().view({1, -1}), exact(grad).sum(0, true));
}

TEST_P(Fp8Layers, SeveralLinearsAreOneMatrix) {
  const at::Tensor x = leaf({32, 48});
  const Tensors weights{leaf({32, 48}, 0.1), leaf({16, 48}), leaf({64, 48}, 0.01)};
  const at::Tensor y = linears(x, weights, {}, recipe());
  const at::Tensor grad = leaf({32, 112}).detach();
  y.backward(grad);
  Tensors gradients;
  for (const at::Tensor& weight : weights) gradients.push_back(weight.grad());
  expect_right(y, grad, x, x.grad(), at::cat(weights), at::cat(gradients));
}

TEST_P(Fp8Layers, TheInputOfLinearsAfterANormIsTheNorms) {
  const at::Tensor x = leaf({48, 64}), added = leaf({48, 64}), scale = leaf({64});
  const Tensors weights{leaf({32, 64}, 0.1), leaf({32, 64}, 0.1)};
  const auto [y, sum] = norm_linears(x, added, scale, 1e-5, weights, {}, recipe());
  const at::Tensor grad = leaf({48, 64}).detach();
  y.backward(grad);
  const at::Tensor between = (x + added).detach().requires_grad_();
  const at::Tensor normed = rms_norm(between, scale.detach());
  normed.backward(rounded(grad, false)
                      .matmul(rounded(at::cat(weights), true))
                      .to(normed.device(), at::kBFloat16));
  expect_right(y, grad, normed, {}, at::cat(weights),
               at::cat({weights[0].grad(), weights[1].grad()}));
  expect_near(x.grad(), exact(between.grad()), 2e-2);
  expect_near(added.grad(), exact(between.grad()), 2e-2);
}

TEST_P(Fp8Layers, TheInputOfALinearAfterSwigluIsSwiglus) {
  const at::Tensor gate_up = leaf({32, 128}), weight = leaf({48, 64}, 0.1);
  const at::Tensor y = swiglu_linear(gate_up, weight, {}, WeightLayout::kOutIn, recipe());
  const at::Tensor grad = leaf({32, 48}).detach();
  y.backward(grad);
  const at::Tensor between = gate_up.detach().requires_grad_();
  const at::Tensor active = swiglu(between);
  active.backward(
      rounded(grad, false).matmul(rounded(weight, true)).to(active.device(), at::kBFloat16));
  expect_right(y, grad, active, {}, weight, weight.grad());
  expect_near(gate_up.grad(), exact(between.grad()), 2e-2);
}

TEST_P(Fp8Layers, AnInfiniteNumberReachesTheGradients) {
  for (bool in_weight : {false, true}) {
    const at::Tensor x = leaf({32, 64}), weight = leaf({16, 64});
    {
      torch::NoGradGuard no_grad;
      (in_weight ? weight : x)[3][5] = INFINITY;
    }
    const at::Tensor y = linear(x, weight, {}, WeightLayout::kOutIn, recipe());
    EXPECT_FALSE(y.cpu().isfinite().all().item<bool>());
    y.square().sum().backward();
    EXPECT_FALSE(weight.grad().cpu().isfinite().all().item<bool>());
  }
}

TEST_P(Fp8Layers, OddNumbersOfRowsAreComputedAsUsual) {
  const at::Tensor x = leaf({17, 64}), weight = leaf({16, 64});
  const at::Tensor y = linear(x, weight, {}, WeightLayout::kOutIn, recipe());
  EXPECT_TRUE(at::equal(y, nn::linear(x, weight)));
  y.sum().backward();
  const at::Tensor wide = leaf({32, 60}), other = leaf({16, 60});
  EXPECT_TRUE(
      at::equal(linear(wide, other, {}, WeightLayout::kOutIn, recipe()), nn::linear(wide, other)));
}

TEST(Fp8Memory, ALinearKeepsOneBytePerElement) {
  auto& memory = testing::counted();
  const at::Tensor x = at::randn({256, 512}, at::kBFloat16).requires_grad_();
  const at::Tensor weight = at::randn({256, 512}, at::kBFloat16).requires_grad_();
  for (Fp8 recipe : {Fp8::kTensorwise, Fp8::kRowwise}) {
    const size_t before = memory.live;
    const at::Tensor y = linear(x * 1, weight, {}, WeightLayout::kOutIn, recipe);
    const size_t kept = memory.live - before - y.nbytes();
    EXPECT_GE(kept, 256u * 512);
    EXPECT_LE(kept, 256u * 512 + 4096);
  }
}

// --- which linears are converted ---

struct SomeLinearsImpl : torch::nn::Module {
  Linear wide = register_module("wide", Linear(256, 256));
  Linear odd = register_module("odd", Linear(256, 200));
  Linear narrow = register_module("narrow", Linear(256, 64));
  torch::nn::Linear theirs = register_module("theirs", torch::nn::Linear(256, 256));
};
TORCH_MODULE(SomeLinears);

std::string told(const std::vector<Fp8Linear>& linears) {
  std::string text;
  for (const auto& linear : linears)
    text += linear.name + (linear.why_not.empty() ? "" : ": " + linear.why_not) + "\n";
  return text;
}

TEST(Fp8Conversion, TakesWhatIsWideAndFits) {
  SomeLinears model;
  EXPECT_EQ(told(convert_to_fp8(*model)),
            "wide\n"
            "odd: its sizes, 200 x 256, aren't multiples of 16\n"
            "narrow: 64 x 256 is less than 128 wide\n"
            "theirs: a torch::nn::Linear is converted after fully_shard(), not before\n");
  EXPECT_EQ(model->wide->fp8, Fp8::kTensorwise);
  EXPECT_EQ(model->odd->fp8, Fp8::kNone);
  EXPECT_EQ(model->narrow->fp8, Fp8::kNone);
}

TEST(Fp8Conversion, GoesByNames) {
  SomeLinears model;
  const auto where = [](const std::string& name) { return name != "wide"; };
  const auto done = convert_to_fp8(*model, {.recipe = Fp8::kRowwise, .where = where, .least = 16});
  EXPECT_EQ(done[0].why_not, "excluded by name");
  EXPECT_EQ(model->wide->fp8, Fp8::kNone);
  EXPECT_EQ(model->narrow->fp8, Fp8::kRowwise);
}

TEST(Fp8Conversion, RefusesWhatItCanNotConvert) {
  EXPECT_THROW(convert_to_fp8(*torch::nn::ReLU()), Error);
  EXPECT_THROW(convert_to_fp8(*SomeLinears(), {.recipe = Fp8::kNone}), Error);
}

TEST(Fp8Conversion, StaysInCopies) {
  SomeLinears model;
  convert_to_fp8(*model);
  const auto copy = model->wide->clone();
  EXPECT_EQ(copy->as<LinearImpl>()->fp8, Fp8::kTensorwise);
  const at::Tensor x = at::randn({16, 256});
  EXPECT_TRUE(at::equal(copy->as<LinearImpl>()->forward(x), model->wide(x)));
  EXPECT_FALSE(at::equal(model->wide(x), nn::linear(x, model->wide->weight, model->wide->bias)));
}

}  // namespace
}  // namespace fsdp::nn
