// Attention by a pattern of blocks: against the whole matrix of scores in float64.
#include "fsdp/nn/block_attention.h"

#include "fsdp/error.h"
#include "fsdp/recompute.h"
#include "nn/testing.h"

namespace fsdp::nn {
namespace {

class BlockPatterns : public Layers {};
INSTANTIATE_TEST_SUITE_P(Settings, BlockPatterns, ::testing::ValuesIn(settings()), setting_name);

constexpr int64_t kPatternWidth = 8;

// `seen`: bool [queries, keys].
at::Tensor whole_attention(const Tensors& in, const at::Tensor& seen, double scale) {
  const int64_t group = in[0].size(1) / in[1].size(1);
  const at::Tensor k = in[1].repeat_interleave(group, 1), v = in[2].repeat_interleave(group, 1);
  at::Tensor scores = at::matmul(in[0], k.transpose(-1, -2)) * scale;
  scores = scores.masked_fill(seen.logical_not(), -1e300);  // a row without keys stays finite …
  const at::Tensor weights = scores.softmax(-1) * seen;     // … and is zero
  return at::matmul(weights, v);
}

at::Tensor distances(int64_t queries, int64_t keys) {
  return at::arange(queries).unsqueeze(1) - at::arange(keys);
}

Tensors pattern_inputs(int64_t queries, int64_t keys, int64_t heads = 4, int64_t kv_heads = 2) {
  return {random({2, heads, queries, kPatternWidth}), random({2, kv_heads, keys, kPatternWidth}),
          random({2, kv_heads, keys, kPatternWidth})};
}

TEST_P(BlockPatterns, ReadyPatternsAreThoseOfTheirMasks) {
  for (int64_t tokens : {5, 16, 70, 150})
    for (int64_t block : {16, 32}) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens in blocks of " + std::to_string(block));
      const at::Tensor distance = distances(tokens, tokens), causal = distance.ge(0);
      compare(
          [&](const Tensors& in) {
            return Tensors{block_attention(in[0], in[1], in[2], causal_pattern(block), 0.25)};
          },
          [&](const Tensors& in) { return Tensors{whole_attention(in, causal, 0.25)}; },
          pattern_inputs(tokens, tokens));
      for (auto [global, window] :
           {std::pair<int64_t, int64_t>{0, 2}, {0, 40}, {5, 17}, {64, 32}}) {
        const at::Tensor seen =
            causal.logical_and(distance.lt(window).logical_or(at::arange(tokens).lt(global)));
        compare(
            [&](const Tensors& in) {
              return Tensors{
                  block_attention(in[0], in[1], in[2], global_and_window(global, window, block))};
            },
            [&](const Tensors& in) {
              return Tensors{whole_attention(in, seen, 1 / std::sqrt(double(kPatternWidth)))};
            },
            pattern_inputs(tokens, tokens));
      }
    }
}

// Blocks by their parity, some with a mask, rows of blocks and single queries that see nothing, and
// other keys than queries.
TEST_P(BlockPatterns, APatternOfOnesOwnIsThatOfItsMask) {
  const auto sees = [](int64_t row, int64_t column) {
    if (row == 2) return Sees::kNone;
    return column % 2 == row % 2 ? Sees::kAll : column == 3 ? Sees::kSome : Sees::kNone;
  };
  const auto mask = [](const at::Tensor& queries, const at::Tensor& keys) {
    return (queries + keys).remainder(3).eq(0).logical_and(queries.remainder(5).ne(0));
  };
  const int64_t queries = 75, keys = 64, block = 16;
  at::Tensor seen = at::zeros({queries, keys}, at::kBool);
  for (int64_t q = 0; q < queries; ++q)
    for (int64_t k = 0; k < keys; ++k) {
      const Sees here = sees(q / block, k / block);
      seen[q][k] = here == Sees::kAll || (here == Sees::kSome && (q + k) % 3 == 0 && q % 5 != 0);
    }
  for (int64_t kv_heads : {1, 4})
    compare(
        [&](const Tensors& in) {
          return Tensors{block_attention(in[0], in[1], in[2],
                                         {.block = block, .sees = sees, .mask = mask}, 0.3)};
        },
        [&](const Tensors& in) { return Tensors{whole_attention(in, seen, 0.3)}; },
        pattern_inputs(queries, keys, 4, kv_heads));
}

TEST_P(BlockPatterns, AQueryThatSeesNothingInASeenBlockGetsZeros) {
  const auto sees = [](int64_t, int64_t) { return Sees::kSome; };
  const auto mask = [](const at::Tensor& queries, const at::Tensor& keys) {
    return queries.remainder(2).eq(0).logical_and(keys.ge(0));
  };
  const at::Tensor seen = at::arange(40).remainder(2).eq(0).unsqueeze(1).expand({40, 40});
  compare(
      [&](const Tensors& in) {
        return Tensors{
            block_attention(in[0], in[1], in[2], {.block = 16, .sees = sees, .mask = mask}, 0.3)};
      },
      [&](const Tensors& in) { return Tensors{whole_attention(in, seen, 0.3)}; },
      pattern_inputs(40, 40));
}

// What isn't seen isn't read: it may be anything, even NaN.
TEST(BlockAttention, SkipsBlocksThatArentSeen) {
  at::NoGradGuard no_grad;
  const at::Tensor q = at::randn({1, 2, 512, kPatternWidth});
  const BlockPattern window = global_and_window(0, 64, 32);
  const at::Tensor expected = block_attention(q, q, q, window).narrow(2, 256, 256);
  at::Tensor keys = q.clone();
  keys.narrow(2, 0, 160).fill_(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(at::equal(block_attention(q, keys, keys, window).narrow(2, 256, 256), expected));
}

TEST(BlockAttention, RecomputedIsTheSame) {
  const Tensors in = pattern_inputs(70, 70);
  auto gradients = [&](bool again) {
    Tensors leaves, grads;
    for (const at::Tensor& x : in) leaves.push_back(x.clone().requires_grad_(true));
    auto use = [&] {
      return block_attention(leaves[0] * 2, leaves[1], leaves[2], global_and_window(5, 20, 16))
          .cos();
    };
    (again ? recompute(use) : use()).sum().backward();
    for (const at::Tensor& x : leaves) grads.push_back(x.grad());
    return grads;
  };
  const Tensors once = gradients(false), twice = gradients(true);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(at::equal(once[i], twice[i])) << i;
}

TEST(BlockAttention, WrongInputsAreErrors) {
  const at::Tensor q = at::randn({1, 4, 8, kPatternWidth}), k = at::randn({1, 3, 8, kPatternWidth});
  EXPECT_THROW(block_attention(q, k, k, causal_pattern()), Error);
  EXPECT_THROW(block_attention(q, q, q, {}), Error);
  EXPECT_THROW(global_and_window(0, 0), Error);
}

}  // namespace
}  // namespace fsdp::nn
