// Layers in graphs: a weight used twice, a graph used twice, gradients requested by name, and what
// forward keeps for backward.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include <functional>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/nn.h"
#include "shard/counting_allocator.h"

namespace fsdp::nn {
namespace {

using Tensors = std::vector<at::Tensor>;

class Graphs : public ::testing::Test {
 protected:
  static at::Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes).requires_grad_(); }

  at::Tensor x = leaf({6, 8}), weight = leaf({8, 8}), bias = leaf({8}), scale = leaf({8}),
             wide = leaf({8, 4}), table = leaf({5, 8});
  at::Tensor ids = at::randint(0, 5, {6}, at::kLong);
  Tensors leaves{x, weight, bias, scale, wide, table};

  // All layers, some weights in several of them.
  at::Tensor everything() {
    at::Tensor h = nn::embedding(ids, table) + x;
    auto [packed, sum] = norm_linears(h, nn::linear(h, weight, bias), scale, 1e-5, {weight, table});
    h = swiglu_linear(packed.slice(-1, 0, 8), wide) + sum;
    h = rms_norm(gelu_linear(h, weight, bias, "tanh"), scale);
    h = layer_norm(nn::gelu(h), scale, bias);
    return linear_cross_entropy(h, table, ids, {.chunk = 4});
  }
  Tensors gradients() {
    Tensors all;
    for (const at::Tensor& leaf : leaves) all.push_back(leaf.grad().clone());
    return all;
  }
  void clear() {
    for (at::Tensor& leaf : leaves) leaf.mutable_grad() = at::Tensor();
  }
};

TEST_F(Graphs, WeightsThatAreUsedSeveralTimesGetTheSumOfTheirGradients) {
  at::Tensor ours = nn::linear(nn::linear(x, weight), weight).square().sum();
  ours.backward();
  Tensors mine{x.grad().clone(), weight.grad().clone()};
  clear();
  at::matmul(at::matmul(x, weight.t()), weight.t()).square().sum().backward();
  EXPECT_TRUE(at::allclose(mine[0], x.grad(), 1e-4, 1e-4));
  EXPECT_TRUE(at::allclose(mine[1], weight.grad(), 1e-4, 1e-4));
}

TEST_F(Graphs, GradientsOfManyBackwardsAddUp) {
  everything().backward();
  Tensors once = gradients();
  everything().backward();
  Tensors twice = gradients();
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(at::allclose(twice[i], 2 * once[i])) << i;
}

TEST_F(Graphs, ARetainedGraphGivesTheSameAgain) {
  at::Tensor loss = everything();
  loss.backward({}, /*retain_graph=*/true);
  Tensors once = gradients();
  clear();
  loss.backward();
  Tensors again = gradients();
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(at::equal(again[i], once[i])) << i;
  EXPECT_ANY_THROW(loss.backward());  // the graph is freed
}

TEST_F(Graphs, TheLossIsScaledByWhatComesAfterIt) {
  everything().backward();
  Tensors once = gradients();
  clear();
  (everything() * 4).backward();  // a power of two: nothing is rounded differently
  Tensors scaled = gradients();
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(at::equal(scaled[i], 4 * once[i])) << i;
}

TEST_F(Graphs, AutogradGradHandsThemOverAndLeavesNone) {
  everything().backward();
  Tensors expected = gradients();
  clear();
  Tensors named = torch::autograd::grad({everything()}, {weight, table});
  EXPECT_TRUE(at::equal(named[0], expected[1]));
  EXPECT_TRUE(at::equal(named[1], expected[5]));
  for (const at::Tensor& leaf : leaves) EXPECT_FALSE(leaf.grad().defined());
}

TEST_F(Graphs, ASecondDerivativeIsRefusedByName) {
  try {
    torch::autograd::grad({everything()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    std::string text = error.what();
    EXPECT_NE(text.find("has no second derivative"), std::string::npos) << text;
    EXPECT_NE(text.find("HINT"), std::string::npos) << text;
  }
}

TEST_F(Graphs, NothingIsRecordedWhereNoGradientIsWanted) {
  {
    torch::NoGradGuard no_grad;
    EXPECT_FALSE(everything().requires_grad());
  }
  {
    c10::InferenceMode inference;
    EXPECT_FALSE(everything().requires_grad());
  }
  for (at::Tensor& leaf : leaves) leaf.set_requires_grad(false);
  EXPECT_FALSE(everything().requires_grad());
}

TEST_F(Graphs, ResultsMayBeChangedInPlace) {
  at::Tensor ours = nn::linear(x, weight, bias).relu_();
  ours.sum().backward();
  at::Tensor mine = weight.grad().clone();
  clear();
  at::linear(x, weight, bias).relu().sum().backward();
  EXPECT_TRUE(at::allclose(mine, weight.grad(), 1e-5, 1e-6));
}

TEST_F(Graphs, AKeptTensorThatWasChangedIsNoticed) {
  at::Tensor h = x * 1;
  at::Tensor out = rms_norm(h, scale).sum();
  h.mul_(2);
  EXPECT_ANY_THROW(out.backward());
  auto [normed, sum] = add_rms_norm(x * 1, x * 2, scale);
  sum.mul_(2);
  EXPECT_ANY_THROW(normed.sum().backward());
}

TEST_F(Graphs, InputsOfAnotherTypeAreCast) {
  for (at::Tensor& leaf : leaves) leaf = leaf.detach().to(at::kBFloat16).requires_grad_();
  at::Tensor input = leaf({6, 8});
  at::Tensor h = nn::linear(rms_norm(input, leaves[3]), leaves[1], leaves[2]);
  EXPECT_EQ(h.scalar_type(), at::kBFloat16);
  auto [out, sum] = norm_linears(input, h, leaves[3], 1e-5, {leaves[1]});
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(sum.scalar_type(), at::kFloat);  // the residual stream keeps its dtype
  linear_cross_entropy(out.to(at::kFloat), leaves[5], ids).backward();
  EXPECT_EQ(input.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(leaves[1].grad().scalar_type(), at::kBFloat16);
  EXPECT_GT(input.grad().abs().max().item<double>(), 0);
}

// --- memory kept for backward ---

size_t kept_by(const std::function<at::Tensor()>& forward) {
  size_t before = testing::counted().live;
  at::Tensor out = forward();
  return testing::counted().live - before - out.nbytes();
}

TEST_F(Graphs, NormsAndActivationsKeepTheirInputsOnly) {
  testing::counted();
  at::Tensor h = at::randn({64, 256}).requires_grad_(), norm = at::ones({256}).requires_grad_();
  at::Tensor matrix = leaf({512, 256}), down = leaf({256, 256});
  size_t row_numbers = 64 * sizeof(float) * 4 + 256;
  EXPECT_LE(kept_by([&] { return norm_linears(h, {}, norm, 1e-5, {matrix}).out; }), row_numbers);
  at::Tensor gate_up = leaf({64, 512});
  EXPECT_LE(kept_by([&] { return swiglu_linear(gate_up, down); }), 256u);
  EXPECT_LE(kept_by([&] { return gelu_linear(h, down); }), 256u);
}

TEST_F(Graphs, LinearCrossEntropyNeverHoldsMoreThanAChunkOfLogits) {
  const int64_t rows = 512, vocab = 1000, dim = 16, chunk = 32;
  auto& memory = testing::counted();
  at::Tensor h = at::randn({rows, dim}).requires_grad_(), head = leaf({vocab, dim});
  at::Tensor targets = at::randint(0, vocab, {rows}, at::kLong);
  size_t before = memory.live;
  memory.peak = before;
  linear_cross_entropy(h, head, targets, {.chunk = chunk}).backward();
  size_t logits = chunk * vocab * sizeof(float), gradients = 2 * (h.nbytes() + head.nbytes());
  EXPECT_LE(memory.peak - before, 2 * logits + 2 * gradients);
  EXPECT_LE(2 * logits + 2 * gradients,
            rows * vocab * sizeof(float) / 2);  // otherwise this shows nothing
}

TEST_F(Graphs, ANodeDoesNotKeepItselfAlive) {
  testing::counted();
  size_t before = testing::counted().live;
  for (int i = 0; i < 3; ++i) {
    auto [packed, sum] = norm_linears(x * 1, x * 2, scale, 1e-5, {weight});
    auto [normed, second] = add_rms_norm(sum, packed, scale);
    everything();
  }
  EXPECT_EQ(testing::counted().live, before);
}

TEST_F(Graphs, WhatDoesNotFitIsRefused) {
  auto hint_of = [](const std::function<void()>& act) -> std::string {
    try {
      act();
    } catch (const Error& error) {
      return error.hint();
    }
    return "";
  };
  EXPECT_NE(hint_of([&] { norm_linears(x, {}, scale, 1e-5, {}); }), "");
  EXPECT_NE(hint_of([&] { norm_linears(x, {}, scale, 1e-5, {weight, weight}, {bias}); }), "");
  EXPECT_NE(hint_of([&] { nn::gelu(x, "sigmoid"); }), "");
  EXPECT_NE(hint_of([&] { rope_heads(x, bias, bias, 3, 1); }), "");
  EXPECT_NE(hint_of([&] { nn::cross_entropy(x, ids.to(at::kInt)); }), "");
  EXPECT_NE(hint_of([&] { nn::cross_entropy(x, ids.slice(0, 1)); }), "");
}

}  // namespace
}  // namespace fsdp::nn
