// RoPE, attention, embeddings and losses, each against torch's operators in float64.
#include <ATen/autocast_mode.h>

#include <cmath>
#include <limits>

#include "nn/testing.h"

namespace fsdp::nn {
namespace {

class Ends : public Layers {};

INSTANTIATE_TEST_SUITE_P(Settings, Ends, ::testing::ValuesIn(settings()), setting_name);

// [batch or none, tokens, head_dim], with different angles per sequence.
std::pair<at::Tensor, at::Tensor> tables(int64_t batch, int64_t tokens, int64_t head_dim) {
  at::Tensor half = at::rand({std::max<int64_t>(1, batch), tokens, head_dim / 2}, at::kDouble) * 6;
  at::Tensor angles = at::cat({half, half}, -1);
  if (batch == 0) angles = angles[0];
  return {angles.cos(), angles.sin()};
}

// x [batch, heads, tokens, head_dim]
at::Tensor turned(const at::Tensor& x, at::Tensor cos, at::Tensor sin) {
  if (cos.dim() == 3) cos = cos.unsqueeze(1), sin = sin.unsqueeze(1);
  Tensors halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

at::Tensor plain_attention(const at::Tensor& q, at::Tensor k, at::Tensor v, bool causal,
                           const at::Tensor& mask = {}) {
  k = k.repeat_interleave(q.size(1) / k.size(1), 1);
  v = v.repeat_interleave(q.size(1) / v.size(1), 1);
  at::Tensor scores = at::matmul(q, k.transpose(-1, -2)) / std::sqrt(double(q.size(-1)));
  at::Tensor seen = at::ones({q.size(2), k.size(2)}, at::kBool);
  if (causal) seen = seen.tril();
  if (mask.defined()) seen = seen.logical_and(mask);
  scores = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  return at::matmul(scores.softmax(-1), v);
}

TEST_P(Ends, RopeTurnsPairs) {
  for (int64_t batch : {0, 2}) {
    auto [cos, sin] = tables(batch, 5, 6);
    auto table = [&](const at::Tensor& t) { return t.to(here()); };
    // Tables in the dtype of x are rounded; both sides use the rounded ones.
    at::Tensor c = cos.to(GetParam().type).to(at::kDouble),
               s = sin.to(GetParam().type).to(at::kDouble);
    compare([&](const Tensors& in) { return Tensors{nn::rope(in[0], table(c), table(s))}; },
            [&](const Tensors& in) {
              return Tensors{turned(in[0].transpose(1, 2), c, s).transpose(1, 2)};
            },
            {random({2, 5, 3, 6})});
  }
}

Heads cut(const at::Tensor& qkv, int64_t heads, int64_t kv_heads) {
  auto all = qkv.unflatten(-1, {heads + 2 * kv_heads, -1}).transpose(1, 2);
  return {all.narrow(1, 0, heads), all.narrow(1, heads, kv_heads),
          all.narrow(1, heads + kv_heads, kv_heads)};
}

TEST_P(Ends, RopeHeadsCutsAndTurns) {
  for (int64_t kv_heads : {4, 2, 1})
    for (int64_t batch : {0, 2}) {
      auto [cos, sin] = tables(batch, 5, 6);
      at::Tensor c = cos.to(GetParam().type).to(at::kDouble),
                 s = sin.to(GetParam().type).to(at::kDouble);
      auto ours = [&](const Tensors& in) {
        Heads all = rope_heads(in[0] * 1, c.to(here()), s.to(here()), 4, kv_heads);
        return Tensors{all.q, all.k, all.v};
      };
      auto plain = [&](const Tensors& in) {
        Heads all = cut(in[0], 4, kv_heads);
        return Tensors{turned(all.q, c, s), turned(all.k, c, s), all.v * 1};
      };
      compare(ours, plain, {random({2, 5, (4 + 2 * kv_heads) * 6})});
    }
}

TEST_P(Ends, RopeHeadsOfWhichOnlySomeAreUsed) {
  auto [cos, sin] = tables(0, 5, 6);
  at::Tensor c = cos.to(GetParam().type).to(at::kDouble),
             s = sin.to(GetParam().type).to(at::kDouble);
  compare(
      [&](const Tensors& in) {
        return Tensors{
            rope_heads(in[0], c.to(here()), s.to(here()), 2, 1).k};  // a leaf isn't overwritten
      },
      [&](const Tensors& in) { return Tensors{turned(cut(in[0], 2, 1).k, c, s)}; },
      {random({2, 5, 24})});
}

TEST_P(Ends, RopeAttention) {
  for (int64_t kv_heads : {4, 2})
    for (auto [tokens, head_dim] :
         {std::pair(1, 8), std::pair(33, 8), std::pair(128, 64)}) {  // the last one uses cuDNN
      auto [cos, sin] = tables(0, tokens, head_dim);
      at::Tensor c = cos.to(GetParam().type).to(at::kDouble),
                 s = sin.to(GetParam().type).to(at::kDouble);
      auto ours = [&](const Tensors& in) {
        return Tensors{
            rope_attention(in[0] * 1, c.to(here()), s.to(here()), 4, kv_heads, {.causal = true})};
      };
      auto plain = [&](const Tensors& in) {
        Heads all = cut(in[0], 4, kv_heads);
        at::Tensor mixed = plain_attention(turned(all.q, c, s), turned(all.k, c, s), all.v, true);
        return Tensors{mixed.transpose(1, 2).flatten(2)};
      };
      compare(ours, plain, {random({2, tokens, (4 + 2 * kv_heads) * head_dim})});
    }
}

TEST_P(Ends, RopeAttentionOfPartsOfOneTensor) {
  auto [cos, sin] = tables(0, 8, 8);
  at::Tensor c = cos.to(GetParam().type).to(at::kDouble),
             s = sin.to(GetParam().type).to(at::kDouble);
  auto ours = [&](const Tensors& in) {
    at::Tensor all = in[0] * 1;
    Tensors parts;
    for (int64_t i : {0, 1})  // each rotates its part in place
      parts.push_back(rope_attention(all.narrow(0, i, 1), c.to(here()), s.to(here()), 2, 1));
    return Tensors{at::cat(parts)};
  };
  auto plain = [&](const Tensors& in) {
    Heads all = cut(in[0], 2, 1);
    at::Tensor mixed = plain_attention(turned(all.q, c, s), turned(all.k, c, s), all.v, false);
    return Tensors{mixed.transpose(1, 2).flatten(2)};
  };
  compare(ours, plain, {random({2, 8, 4 * 8})});
}

TEST_P(Ends, AttentionWithMasksGroupsAndWithout) {
  at::Tensor mask = at::rand({2, 1, 6, 6}).gt(0.4).logical_or(at::eye(6).to(at::kBool));
  for (int64_t kv_heads : {4, 1})
    for (bool causal : {false, true})
      for (bool masked : {false, true}) {
        if (causal && masked) continue;
        auto ours = [&](const Tensors& in) {
          at::Tensor m = masked ? mask.to(GetParam().device) : at::Tensor();
          return Tensors{attention(in[0], in[1], in[2], {.causal = causal, .mask = m})};
        };
        auto plain = [&](const Tensors& in) {
          return Tensors{
              plain_attention(in[0], in[1], in[2], causal, masked ? mask : at::Tensor())};
        };
        compare(ours, plain,
                {random({2, 4, 6, 8}), random({2, kv_heads, 6, 8}), random({2, kv_heads, 6, 8})});
      }
}

TEST_P(Ends, EmbeddingAddsUpRowsAndLeavesPaddingOut) {
  at::Tensor ids = at::randint(0, 7, {3, 5}, at::kLong);
  for (std::optional<int64_t> padding : {std::optional<int64_t>(), {2}, {-1}}) {
    auto ours = [&](const Tensors& in) { return Tensors{nn::embedding(in[1], in[0], padding)}; };
    auto plain = [&](const Tensors& in) {
      int64_t index = padding.value_or(-100);
      if (index == -1) index = 6;
      at::Tensor weight = in[0];
      if (padding) {  // its row has no gradient
        at::Tensor kept = at::arange(7).ne(index).unsqueeze(1);
        weight = at::where(kept, weight, weight.detach());
      }
      return Tensors{weight.index_select(0, in[1].flatten()).view({3, 5, 6})};
    };
    compare(ours, plain, {random({7, 6}), ids});
  }
}

// --- losses ---

at::Tensor plain_loss(const at::Tensor& logits, const at::Tensor& targets, Reduction reduction) {
  at::Tensor counts = targets.ne(-100);
  at::Tensor chosen = logits.log_softmax(-1).gather(-1, targets.clamp_min(0).unsqueeze(-1));
  at::Tensor losses = at::where(counts, -chosen.squeeze(-1), at::zeros({}, at::kDouble));
  if (reduction == Reduction::kNone) return losses;
  return reduction == Reduction::kSum ? losses.sum() : losses.sum() / counts.sum();
}

at::Tensor targets_of(at::IntArrayRef sizes, int64_t vocab) {
  at::Tensor targets = at::randint(0, vocab, sizes, at::kLong);
  return targets.masked_fill(at::rand(sizes).lt(0.3), -100);
}

TEST_P(Ends, CrossEntropy) {
  for (Reduction reduction : {Reduction::kMean, Reduction::kSum, Reduction::kNone})
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{9}, {2, 5}})
      for (int64_t vocab : {3, 130}) {
        std::vector<int64_t> all = sizes;
        all.push_back(vocab);
        at::Tensor targets = targets_of(sizes, vocab);
        targets.view({-1})[0] = 1;
        compare(
            [&](const Tensors& in) {
              return Tensors{nn::cross_entropy(in[0], in[1], {.reduction = reduction})};
            },
            [&](const Tensors& in) { return Tensors{plain_loss(in[0], in[1], reduction)}; },
            {random(all, 2), targets});
      }
}

TEST_P(Ends, LinearCrossEntropyInChunksOfAnySize) {
  at::Tensor targets = targets_of({2, 7}, 19);
  targets[0][0] = 3;
  for (Reduction reduction : {Reduction::kMean, Reduction::kSum, Reduction::kNone})
    for (int64_t chunk : {0, 1, 3, 7, 14, 100})
      for (const std::vector<size_t>& frozen : {std::vector<size_t>{}, {0}, {1}, {0, 1}})
        compare(
            [&](const Tensors& in) {
              return Tensors{linear_cross_entropy(in[0], in[1], in[2],
                                                  {.reduction = reduction, .chunk = chunk})};
            },
            [&](const Tensors& in) {
              return Tensors{plain_loss(at::matmul(in[0], in[1].t()), in[2], reduction)};
            },
            {random({2, 7, 10}), random({19, 10}), targets}, frozen);
}

TEST_P(Ends, ALossOverNoTargetIsZeroOrNotANumberAndItsGradientZero) {
  at::Tensor hidden = random({4, 6}).to(here()).requires_grad_();
  at::Tensor weight = random({5, 6}).to(here()).requires_grad_();
  at::Tensor targets = at::full({4}, -100, at::TensorOptions(GetParam().device).dtype(at::kLong));
  at::Tensor sum = linear_cross_entropy(hidden, weight, targets, {.reduction = Reduction::kSum});
  EXPECT_EQ(sum.item<double>(), 0);
  sum.backward();
  EXPECT_EQ(weight.grad().abs().max().item<double>(), 0);
  EXPECT_EQ(hidden.grad().abs().max().item<double>(), 0);
  EXPECT_TRUE(std::isnan(linear_cross_entropy(hidden, weight, targets).item<double>()));
  EXPECT_TRUE(std::isnan(
      nn::cross_entropy(at::matmul(hidden, weight.t()).detach(), targets).item<double>()));
}

TEST_P(Ends, LossesAreFloat32) {
  at::Tensor hidden = random({4, 6}).to(here()), weight = random({5, 6}).to(here());
  at::Tensor targets = at::zeros({4}, at::TensorOptions(GetParam().device).dtype(at::kLong));
  EXPECT_EQ(linear_cross_entropy(hidden, weight, targets).scalar_type(), at::kFloat);
  EXPECT_EQ(nn::cross_entropy(hidden, targets).scalar_type(), at::kFloat);
}

// 1 / (rows * classes) underflows in float16, so gradients must not be divided before scaling.
TEST_P(Ends, TheMeanOfManyRowsHasAGradientInSixteenBits) {
  if (c10::elementSize(GetParam().type) > 2) GTEST_SKIP() << "there is room enough";
  constexpr int64_t kRows = 4096, kClasses = 4096;
  at::Tensor hidden = random({kRows, 16}), weight = random({kClasses, 16}, 0.1);
  at::Tensor targets = at::randint(kClasses, {kRows}, at::kLong);
  at::Tensor ours = hidden.to(here()).requires_grad_(), w = weight.to(here()).requires_grad_();
  at::Tensor plain = ours.detach().to(at::kCPU, at::kDouble).requires_grad_();
  at::Tensor plain_w = w.detach().to(at::kCPU, at::kDouble).requires_grad_();
  constexpr double kScale = 1 << 15;  // as a GradScaler does
  (linear_cross_entropy(ours, w, targets.to(GetParam().device)) * kScale).backward();
  (at::cross_entropy_loss(at::matmul(plain, plain_w.t()), targets) * kScale).backward();
  expect_near(ours.grad(), plain.grad(), "hidden");
  expect_near(w.grad(), plain_w.grad(), "weight");
}

// Layers compute in the dtype of their weights, in forward and in backward.
TEST_P(Ends, AutocastChangesNothing) {
  at::Tensor hidden = random({6, 16}), weight = random({24, 16});
  auto gradient = [&](bool cast) {
    at::Tensor x = hidden.to(here()).requires_grad_(), w = weight.to(here()).requires_grad_();
    at::autocast::set_autocast_enabled(GetParam().device, cast);
    at::Tensor y = swiglu(fsdp::nn::linear(x, w));
    y.backward(at::ones_like(y));
    at::autocast::set_autocast_enabled(GetParam().device, false);
    return std::pair(y.detach(), w.grad());
  };
  auto [y, plain] = gradient(false);
  auto [cast_y, cast] = gradient(true);
  EXPECT_EQ(cast_y.scalar_type(), GetParam().type);
  EXPECT_TRUE(at::equal(y, cast_y));
  EXPECT_TRUE(at::equal(plain, cast));
}

}  // namespace
}  // namespace fsdp::nn
