// Mixtures of experts against a plain reference in float64 that computes every expert for every
// token, with torch's operators.
#include "fsdp/nn/moe.h"

#include <cmath>

#include "fsdp/error.h"
#include "kernels/groups.h"
#include "nn/testing.h"

namespace fsdp::nn {
namespace {

constexpr int64_t kTokens = 24, kDim = 16, kWidth = 8, kExperts = 6;

// The output, the balance loss and the z-loss, each expert dense.
Tensors dense(const Tensors& inputs, const RouteOptions& options, const at::Tensor& bias) {
  const at::Tensor x = inputs[0].flatten(0, -2);
  const at::Tensor logits = at::matmul(x, inputs[1].t());
  const at::Tensor scores =
      options.score == RouterScore::kSoftmax ? at::softmax(logits, -1) : at::sigmoid(logits);
  const at::Tensor wish = bias.defined() ? scores + bias : scores;
  const at::Tensor chosen = std::get<1>(at::topk(wish.detach(), options.top_k, -1));
  const at::Tensor mask = at::zeros_like(scores).scatter(1, chosen, 1.0).detach();
  at::Tensor weights = scores * mask;
  if (options.normalize) weights = weights / weights.sum(-1, true);
  weights = weights * options.scale;
  at::Tensor out = at::zeros_like(x);
  for (int64_t expert = 0; expert < inputs[2].size(0); ++expert) {
    const Tensors halves = at::matmul(x, inputs[2][expert].t()).chunk(2, -1);
    const at::Tensor hidden = at::silu(halves[0]) * halves[1];
    out = out + at::matmul(hidden, inputs[3][expert].t()) * weights.select(1, expert).unsqueeze(1);
  }
  const at::Tensor shares = scores / scores.sum(-1, true);
  const at::Tensor balance = (mask.mean(0) * shares.mean(0)).sum() * scores.size(1);
  return {out.view(inputs[0].sizes()), balance, at::logsumexp(logits, -1).square().mean()};
}

Tensors mixed(const Tensors& inputs, const RouteOptions& options, const at::Tensor& bias) {
  const at::Tensor logits = router_logits(inputs[0], inputs[1]);
  const Routing routing = route(logits, options, bias);
  return {mix_experts(inputs[0], inputs[2], inputs[3], routing), balance_loss(routing),
          router_z_loss(logits)};
}

Tensors random_mixture() {
  return {random({2, kTokens / 2, kDim}), random({kExperts, kDim}, 0.5),
          random({kExperts, 2 * kWidth, kDim}, 0.3), random({kExperts, kDim, kWidth}, 0.3)};
}

class Mixtures : public Layers {
 protected:
  void SetUp() override {
    Layers::SetUp();
    if (GetParam().device == at::kCUDA && GetParam().type == at::kDouble) GTEST_SKIP();
  }

  void expect_dense(const RouteOptions& options, const at::Tensor& bias = {},
                    const std::vector<size_t>& frozen = {}) {
    compare(
        [&](const Tensors& inputs) {
          return mixed(inputs, options,
                       bias.defined() ? bias.to(GetParam().device, at::kFloat) : bias);
        },
        [&](const Tensors& inputs) { return dense(inputs, options, bias); }, random_mixture(),
        frozen);
  }
};

TEST_P(Mixtures, EqualADenseSumOverExperts) {
  for (const auto score : {RouterScore::kSoftmax, RouterScore::kSigmoid})
    for (const int64_t top_k : {int64_t{1}, int64_t{2}, kExperts})
      for (const bool normalize : {false, true}) {
        SCOPED_TRACE(::testing::Message() << int(score) << " " << top_k << " " << normalize);
        // With one normalized expert the router gets no gradient but rounding's.
        if (top_k > 1 || !normalize)
          expect_dense({.top_k = top_k, .score = score, .normalize = normalize, .scale = 1.5});
      }
}

TEST_P(Mixtures, ABiasChoosesExpertsAndWeighsNone) {
  const at::Tensor bias = at::tensor({2.0, 0.0, -3.0, 0.0, 1.0, 0.0}, at::kDouble);
  expect_dense({.top_k = 2, .score = RouterScore::kSigmoid, .scale = 2.5}, bias);
}

TEST_P(Mixtures, ExpertsWithoutTokensGetZeroGradients) {
  const at::Tensor bias = at::tensor({9.0, 0.0, -9.0, -9.0, 0.0, -9.0}, at::kDouble);
  expect_dense({.top_k = 2}, bias);
}

TEST_P(Mixtures, FrozenPartsGetNoGradient) {
  for (const std::vector<size_t>& frozen :
       std::vector<std::vector<size_t>>{{0}, {1}, {2}, {3}, {0, 1}, {2, 3}, {0, 1, 2}})
    expect_dense({.top_k = 2}, {}, frozen);
}

INSTANTIATE_TEST_SUITE_P(Settings, Mixtures, ::testing::ValuesIn(settings()), setting_name);

// --- what the kernels and the module promise ---

TEST(GroupedProducts, AddToTheirTargetInItsOwnDtype) {
  const at::Tensor ends = at::tensor({3, 3, 7}, at::kInt);
  const at::Tensor grad = at::randn({7, 4}), x = at::randn({7, 5});
  at::Tensor expected = at::ones({3, 4, 5}, at::kDouble);
  expected[0] += at::matmul(grad.slice(0, 0, 3).t(), x.slice(0, 0, 3)).to(at::kDouble);
  expected[2] += at::matmul(grad.slice(0, 3).t(), x.slice(0, 3)).to(at::kDouble);
  for (const auto type : {at::kFloat, at::kDouble}) {
    const at::Tensor target = at::ones({3, 4, 5}, type);
    kernels::grouped_mm_into(target, grad, x, ends, /*accumulate=*/true);
    EXPECT_TRUE(at::allclose(target.to(at::kDouble), expected, 1e-5, 1e-5)) << toString(type);
    kernels::grouped_mm_into(target, grad, x, ends, /*accumulate=*/false);
    EXPECT_TRUE(at::allclose(target.to(at::kDouble), expected - 1, 1e-5, 1e-5)) << toString(type);
  }
  EXPECT_THROW(kernels::grouped_mm(x, at::randn({2, 4, 5}), ends, false), Error);
}

TEST(Routings, SortTokensByExpertAndKeepTheirOrder) {
  const at::Tensor logits = at::log(at::tensor({0.1, 0.2, 0.7, 0.5, 0.4, 0.1, 0.1, 0.3, 0.6}))
                                .view({3, 3})
                                .to(at::kFloat);
  const Routing routing = route(logits, {.top_k = 2});
  EXPECT_TRUE(at::equal(routing.chosen, at::tensor({2, 1, 0, 1, 2, 1}, at::kLong).view({3, 2})));
  EXPECT_TRUE(at::equal(routing.order, at::tensor({2, 1, 3, 5, 0, 4}, at::kLong)));
  EXPECT_TRUE(at::equal(routing.ends, at::tensor({1, 4, 6}, at::kInt)));
  EXPECT_TRUE(at::equal(load_of(routing), at::tensor({1, 3, 2}, at::kLong)));
  EXPECT_TRUE(at::equal(routing.order.index_select(0, routing.place), at::arange(6, at::kLong)));
  EXPECT_TRUE(at::allclose(routing.weights.sum(-1), at::ones({3})));
}

// A weight of bfloat16 is read exactly, and the sum isn't rounded to it.
TEST(Routings, AreComputedInFloat32) {
  const at::Tensor x = at::randn({5, 64}).to(at::kBFloat16);
  const at::Tensor weight = at::randn({4, 64}).to(at::kBFloat16);
  const at::Tensor logits = router_logits(x, weight);
  EXPECT_EQ(logits.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::allclose(logits.to(at::kDouble),
                           at::matmul(x.to(at::kDouble), weight.to(at::kDouble).t()), 1e-5, 1e-5));
}

MoEOptions small_options() {
  return {.dim = kDim,
          .ffn = kWidth,
          .experts = kExperts,
          .shared_ffn = 12,
          .biased = true,
          .balance = 0.1,
          .z = 0.01};
}

TEST(MoEModule, AddsSharedExpertsAndItsLosses) {
  torch::manual_seed(4);
  MoE moe(small_options());
  const at::Tensor x = at::randn({5, kDim});
  const auto [out, loss] = moe(x);
  const Tensors parts =
      dense({x, moe->gate->weight, moe->experts->gate_up_proj, moe->experts->down_proj}, {}, {});
  const auto& shared = moe->shared_experts;
  const at::Tensor same = at::matmul(at::silu(at::matmul(x, shared->gate_proj->weight.t())) *
                                         at::matmul(x, shared->up_proj->weight.t()),
                                     shared->down_proj->weight.t());
  EXPECT_TRUE(at::allclose(out, parts[0] + same, 1e-5, 1e-6));
  EXPECT_NEAR(loss.item<double>(), (0.1 * parts[1] + 0.01 * parts[2]).item<double>(), 1e-6);
  moe->eval();
  EXPECT_FALSE(moe(x).loss.defined());
}

TEST(MoEModule, CountsTokensInTrainingAndDropsNone) {
  torch::manual_seed(4);
  MoE moe(small_options());
  EXPECT_FALSE(moe->tally().load.defined());
  const at::Tensor x = at::randn({7, kDim});
  for (int pass = 0; pass < 2; ++pass) moe(x);
  {
    const torch::NoGradGuard no_grad;
    moe(x);
  }
  const MoETally tally = moe->tally();
  EXPECT_EQ(tally.tokens.item<double>(), 14);
  EXPECT_EQ(tally.load.sum().item<double>(), 28);
  const at::Tensor shares = at::softmax(at::matmul(x, moe->gate->weight.t()), -1).detach();
  EXPECT_NEAR(tally.entropy.item<double>(), -2 * (shares * shares.log()).sum().item<double>(),
              1e-4);
  moe->reset_tally();
  EXPECT_EQ(tally.load.sum().item<double>(), 0);
}

// Without any loss, a bias that follows the load makes it even.
TEST(MoEModule, ABiasBalancesTheLoad) {
  torch::manual_seed(4);
  MoEOptions options = small_options();
  options.route.score = RouterScore::kSigmoid;
  MoE moe(options);
  {
    const torch::NoGradGuard no_grad;
    moe->gate->weight.mul_(4);
    moe->gate->weight[2].zero_();
  }
  const at::Tensor x = at::randn({512, kDim}) + 0.5;
  const auto spread = [&] {
    moe->reset_tally();
    moe(x);
    const at::Tensor load = moe->tally().load.clone();
    moe->update_bias(load, 0.01);
    return ((load.max() - load.min()) / load.mean()).item<double>();
  };
  const double before = spread();
  double after = before;
  for (int step = 0; step < 200; ++step) after = spread();
  EXPECT_GT(before, 0.5);
  EXPECT_LT(after, 0.25);
}

TEST(MoEModule, IsClonedWithItsBias) {
  MoE moe(small_options());
  moe->update_bias(at::arange(kExperts), 0.5);
  const auto copy = std::dynamic_pointer_cast<MoEImpl>(moe->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(at::equal(copy->gate->e_score_correction_bias, moe->gate->e_score_correction_bias));
  const at::Tensor x = at::randn({3, kDim});
  EXPECT_TRUE(at::equal(copy->forward(x).out, moe(x).out));
  EXPECT_EQ(copy->named_parameters().keys(), moe->named_parameters().keys());
}

// The fused functions read weights alone.
TEST(MoEModule, SharedExpertsHaveAdaptersAndMayBeQuantised) {
  torch::manual_seed(4);
  MoE moe(MoEOptions{.dim = 64, .ffn = 8, .experts = 3, .shared_ffn = 128});
  const at::Tensor x = at::randn({5, 64});
  const torch::NoGradGuard no_grad;
  const at::Tensor plain = moe(x).out;
  add_lora(*moe, {.rank = 4});
  EXPECT_TRUE(at::allclose(moe(x).out, plain, 1e-5, 1e-6));  // B is zero
  moe->shared_experts->up_proj->lora_B->weight.normal_(0, 0.5);
  EXPECT_FALSE(at::allclose(moe(x).out, plain, 1e-3, 1e-3));
  moe->shared_experts->up_proj->lora_B->weight.zero_();
  for (const auto& linear : quantise_linears(*moe, {.quant = Quant::kInt8}))
    EXPECT_EQ(linear.why_not, "") << linear.name;
  const at::Tensor error = moe(x).out - plain;
  EXPECT_GT(error.norm().item<double>(), 0);
  EXPECT_LT(error.norm().item<double>(), 0.02 * plain.norm().item<double>());
}

TEST(MoEModule, RefusesNumbersThatDontFit) {
  EXPECT_THROW(MoE(MoEOptions{.experts = 2, .route = {.top_k = 3}}), Error);
  EXPECT_THROW(MoE(MoEOptions{.ffn = 0}), Error);
  EXPECT_THROW(MoE(MoEOptions{.balance = -1}), Error);
  MoE plain(MoEOptions{.dim = kDim});
  EXPECT_THROW(plain->update_bias(at::zeros({8}), 0.1), Error);
}

}  // namespace
}  // namespace fsdp::nn
