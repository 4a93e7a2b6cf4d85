// Attention with a sliding window: against the whole matrix of scores in float64.
#include "fsdp/error.h"
#include "nn/testing.h"

namespace fsdp::nn {
namespace {

class Window : public Layers {};
INSTANTIATE_TEST_SUITE_P(Settings, Window, ::testing::ValuesIn(settings()), setting_name);

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kWidth = 8;

at::Tensor seen_of(int64_t tokens, int64_t all, int64_t window) {
  at::Tensor distance = at::arange(all - tokens, all).unsqueeze(1) - at::arange(all);
  return distance.ge(0).logical_and(distance.lt(window));
}

at::Tensor plain_attention(const Tensors& in, const at::Tensor& seen, double scale) {
  at::Tensor k = in[1].repeat_interleave(kHeads / kKvHeads, 1),
             v = in[2].repeat_interleave(kHeads / kKvHeads, 1);
  at::Tensor scores = at::matmul(in[0], k.transpose(-1, -2)) * scale;
  scores = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  return at::matmul(scores.softmax(-1), v);
}

Tensors inputs_of(int64_t tokens, int64_t all) {
  return {random({kBatch, kHeads, tokens, kWidth}), random({kBatch, kKvHeads, all, kWidth}),
          random({kBatch, kKvHeads, all, kWidth})};
}

// One block, several whole ones, and a last one that isn't whole; windows below and above a block.
TEST_P(Window, EachTokenSeesItsWindow) {
  for (auto [tokens, window] : {std::pair<int64_t, int64_t>{9, 4},
                                {64, 2},
                                {200, 5},
                                {192, 64},
                                {200, 65},
                                {300, 130},
                                {12, 12},
                                {12, 40}}) {
    SCOPED_TRACE(std::to_string(tokens) + " tokens, window " + std::to_string(window));
    at::Tensor seen = seen_of(tokens, tokens, window);
    compare(
        [&](const Tensors& in) {
          return Tensors{
              attention(in[0], in[1], in[2], {.causal = true, .scale = 0.25, .window = window})};
        },
        [&](const Tensors& in) { return Tensors{plain_attention(in, seen, 0.25)}; },
        inputs_of(tokens, tokens));
  }
}

TEST_P(Window, AMaskTakesAwayFromTheWindow) {
  for (int64_t tokens : {9, 150}) {
    at::Tensor documents = at::arange(tokens).div(7, "floor");
    at::Tensor mask = documents.unsqueeze(0).eq(documents.unsqueeze(1));
    mask = mask.logical_and(seen_of(tokens, tokens, tokens)).view({1, 1, tokens, tokens});
    at::Tensor seen = seen_of(tokens, tokens, 5).logical_and(mask);
    compare(
        [&](const Tensors& in) {
          AttentionOptions options{.mask = mask.to(in[0].device()), .scale = 0.3, .window = 5};
          return Tensors{attention(in[0], in[1], in[2], options)};
        },
        [&](const Tensors& in) { return Tensors{plain_attention(in, seen, 0.3)}; },
        inputs_of(tokens, tokens));
  }
}

TEST_P(Window, QueriesAfterACacheAreTheLastTokens) {
  for (int64_t tokens : {1, 3, 100}) {
    const int64_t all = tokens + 20;
    at::Tensor seen = seen_of(tokens, all, 6), mask = seen_of(tokens, all, all);
    compare(
        [&](const Tensors& in) {
          AttentionOptions options{.scale = 0.3, .window = 6};
          if (tokens > 1) options.mask = mask.view({1, 1, tokens, all}).to(in[0].device());
          return Tensors{attention(in[0], in[1], in[2], options)};
        },
        [&](const Tensors& in) { return Tensors{plain_attention(in, seen, 0.3)}; },
        inputs_of(tokens, all));
  }
}

// What isn't needed isn't computed: keys of far blocks may be anything, even NaN.
TEST(WindowBlocks, DoNotReadKeysThatNoTokenSees) {
  at::NoGradGuard no_grad;
  constexpr int64_t kTokens = 1024, kNan = 512, kFirst = 640;  // a block of 64 and a window later
  at::Tensor q = at::randn({1, 1, kTokens, kWidth});
  AttentionOptions options{.causal = true, .window = 32};
  at::Tensor expected = attention(q, q, q, options).narrow(2, kFirst, kTokens - kFirst);
  at::Tensor keys = q.clone();
  keys.narrow(2, 0, kNan).fill_(std::numeric_limits<float>::quiet_NaN());
  at::Tensor out = attention(q, keys, keys, options).narrow(2, kFirst, kTokens - kFirst);
  EXPECT_TRUE(at::equal(out, expected));
}

TEST(WindowBlocks, AMaskThatIsAddedIsRefused) {
  at::Tensor q = at::randn({1, 1, 8, kWidth}), mask = at::zeros({8, 8});
  EXPECT_THROW(attention(q, q, q, {.mask = mask, .window = 3}), Error);
}

}  // namespace
}  // namespace fsdp::nn
