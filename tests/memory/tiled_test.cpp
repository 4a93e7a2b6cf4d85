// fsdp::tiled: a module over tiles of rows, beside the same module over all rows; what regions
// inside of others keep; and how much memory a feed-forward takes.
#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <limits>

#include "base/seams.h"
#include "fsdp/error.h"
#include "fsdp/nn/functional.h"
#include "fsdp/recompute.h"
#include "memory/activation_offload.h"
#include "memory/side_by_side.h"
#include "shard/counting_allocator.h"
#include "shard/saved_activations.h"
#include "shard/world.h"

namespace fsdp::testing::tiles {
namespace {

namespace saved = shard::saved_activations;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();  // no tiles

struct FeedForwardImpl : torch::nn::Module {
  FeedForwardImpl(int64_t dim, int64_t wide, at::ScalarType type)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})))),
        up(register_module("up", torch::nn::Linear(dim, wide))),
        down(register_module("down", torch::nn::Linear(wide, dim))) {
    to(type);
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(norm(x)).tanh().square()); }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(FeedForward);

// The result, then the gradients of x and of the parameters.
std::vector<at::Tensor> results_of(
    const std::function<at::Tensor(FeedForward&, const at::Tensor&)>& use, const at::Tensor& given,
    int64_t wide = 24) {
  torch::manual_seed(3);
  FeedForward module(given.size(-1), wide, given.scalar_type());
  at::Tensor x = given.clone().requires_grad_(true);
  at::Tensor y = use(module, x);
  y.backward(at::cos(at::arange(y.numel(), given.options())).view(y.sizes()));
  std::vector<at::Tensor> results{y.detach(), x.grad()};
  for (const at::Tensor& parameter : module->parameters()) results.push_back(parameter.grad());
  return results;
}

std::vector<at::Tensor> whole(const at::Tensor& x) {
  return results_of([](FeedForward& module, const at::Tensor& y) { return module(y); }, x);
}

void expect_close(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& expected,
                  double tolerance) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i].sizes(), expected[i].sizes()) << i;
    const at::Tensor wanted = expected[i].to(at::kDouble);
    EXPECT_LE((ours[i].to(at::kDouble) - wanted).abs().max().item<double>(),
              tolerance * wanted.abs().max().item<double>())
        << i;
  }
}

void expect_equal(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i], expected[i])) << i;
}

TEST(Tiled, ResultsAndGradientsAreThoseOfAllRowsAtOnce) {
  const at::Tensor x = at::randn({2, 13, 8}, at::kDouble);
  const std::vector<at::Tensor> expected = whole(x);
  for (int64_t tile : {1, 5, 13, 25, 26, 1000})
    expect_close(
        results_of([&](FeedForward& module, const at::Tensor& y) { return tiled(module, y, tile); },
                   x),
        expected, 1e-13);
  const at::Tensor single = x.to(at::kFloat);
  expect_close(
      results_of([](FeedForward& module, const at::Tensor& y) { return tiled(module, y, 5); },
                 single),
      whole(single.to(at::kDouble)), 1e-5);
}

TEST(Tiled, ALossOfEachRowIsTiledToo) {
  const at::Tensor x = at::randn({3, 7, 8}, at::kDouble), wanted = at::randn({21, 8}, at::kDouble);
  auto loss = [&](int64_t tile) {
    return [&, tile](FeedForward& module, const at::Tensor& y) {
      return tiled([&](const at::Tensor& rows) { return module(rows).square().sum(-1); }, y, tile);
    };
  };
  const auto ours = results_of(loss(4), x);
  EXPECT_EQ(ours[0].sizes(), (at::IntArrayRef{3, 7}));
  expect_close(ours, results_of(loss(kAll), x), 1e-13);
}

TEST(Tiled, WithoutAGraphNothingIsKept) {
  FeedForward module(8, 24, at::kDouble);
  const at::Tensor x = at::randn({20, 8}, at::kDouble);
  at::Tensor y;
  {
    at::NoGradGuard no_grad;
    y = tiled(module, x, 6);
  }
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(at::allclose(y, module(x), 1e-12, 1e-12));
  EXPECT_EQ(tiled(module, at::empty({0, 8}, at::kDouble), 6).size(0), 0);
}

TEST(Tiled, WrongUsesAreErrors) {
  const at::Tensor x = at::ones({4, 2});
  auto same = [](const at::Tensor& rows) { return rows; };
  expect_error([&] { tiled(same, x, 0); }, {"tiles of 0 rows"});
  expect_error([&] { tiled(same, at::ones({4}), 2); }, {"1 dimensions", "[.., rows, dim]"});
  expect_error([&] { tiled([](const at::Tensor& rows) { return rows.sum(0, true); }, x, 2); },
               {"number of rows"});
}

// The wide results are 8 times as large as x, forward keeps three of them and backward makes more.
TEST(Tiled, OneTileOfWideResultsExistsAtATime) {
  const int64_t rows = 4096, dim = 64, wide = 512, x_bytes = rows * dim * 4;
  CountingAllocator& memory = counted();
  torch::manual_seed(3);
  FeedForward module(dim, wide, at::kFloat);
  for (const at::Tensor& parameter : module->parameters())
    parameter.mutable_grad() = at::zeros_like(parameter);
  at::Tensor x = at::randn({rows, dim}).requires_grad_(true);
  auto peak = [&](int64_t tile) {
    const size_t before = memory.live;
    memory.peak = before;
    tiled(module, x, tile).sum().backward();
    const size_t most = memory.peak - before;
    x.mutable_grad().reset();
    return static_cast<int64_t>(most);
  };
  // All results of the tiles and their whole, the gradients likewise, and 1/32 of what is wide.
  EXPECT_LT(peak(rows / 32), 5 * x_bytes);
  EXPECT_GT(peak(kAll), 25 * x_bytes);
}

// Attention stands for what a block computes before its feed-forward.
at::Tensor block(FeedForward& module, const at::Tensor& x, int64_t tile) {
  const at::Tensor before = x.sin().exp() + x;
  return before + tiled(module, before, tile);
}

std::vector<at::Tensor> blocks(std::optional<Recompute> mode, const at::Tensor& x, int64_t tile) {
  return results_of(
      [&](FeedForward& module, const at::Tensor& given) {
        at::Tensor y = given;
        for (int i = 0; i < 4; ++i)
          y = mode ? recompute(*mode, [&] { return block(module, y, tile); })
                   : block(module, y, tile);
        return y;
      },
      x);
}

TEST(Tiled, TilesInARecomputedBlockChangeNoBit) {
  const WithSeams everything({.smallest_offloaded = 1});
  const at::Tensor x = at::randn({2, 20, 8});
  const std::vector<at::Tensor> expected = blocks({}, x, 7);
  for (Recompute mode :
       {Recompute::FULL, Recompute::SELECTIVE, Recompute::OFFLOAD, Recompute::FULL_OFFLOAD})
    expect_equal(blocks(mode, x, 7), expected);
  EXPECT_EQ(memory::offload::use_of(at::kCPU).now, 0);
}

// Bytes kept between forward and backward by `count` blocks.
int64_t kept_by(int count, Recompute mode, int64_t tile) {
  torch::manual_seed(3);
  FeedForward module(8, 24, at::kFloat);
  at::Tensor y = at::randn({40, 8}).requires_grad_(true);
  saved::count(true);
  for (int i = 0; i < count; ++i) y = recompute(mode, [&] { return block(module, y, tile); });
  const int64_t kept = saved::held();
  const at::Tensor loss = y.sum();
  y.reset();
  loss.backward();
  EXPECT_EQ(saved::held(), 0);
  saved::count(false);
  return kept;
}

TEST(Tiled, ARecomputedBlockWithTilesKeepsItsInput) {
  const int64_t x_bytes = 40 * 8 * 4;
  EXPECT_EQ(kept_by(6, Recompute::FULL, 7) - kept_by(2, Recompute::FULL, 7), 4 * x_bytes);
  EXPECT_EQ(kept_by(6, Recompute::FULL, kAll) - kept_by(2, Recompute::FULL, kAll), 4 * x_bytes);
}

TEST(Tiled, InputsOfBlocksWaitInHostMemoryAndComeBackOneBlockAhead) {
  const WithSeams everything({.smallest_offloaded = 1});
  EXPECT_EQ(kept_by(6, Recompute::FULL_OFFLOAD, 7), kept_by(2, Recompute::FULL_OFFLOAD, 7));
  const memory::offload::Copies before = memory::offload::copies();
  auto in = [&] { return memory::offload::copies().in - before.in; };
  auto wide = [](const at::Tensor& rows) {
    return rows.repeat({1, 4}).sin().exp().narrow(1, 0, 8);
  };
  at::Tensor y = at::randn({40, 8}).requires_grad_(true) * 1;
  std::vector<int64_t> brought;  // copies when backward reaches the end of each block
  for (int i = 0; i < 4; ++i) {
    y = recompute(Recompute::FULL_OFFLOAD, [&] { return y + tiled(wide, y.sin().exp(), 7); });
    y.register_hook([&](const at::Tensor&) { brought.push_back(in()); });
  }
  EXPECT_EQ(memory::offload::copies().out - before.out, 4);  // the input of each, once
  const at::Tensor loss = y.sum();
  y.reset();
  loss.backward();
  // The last block's input never left. Its first use brings back the one before it, and so on.
  EXPECT_EQ(brought, (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(memory::offload::use_of(at::kCPU).now, 0);
}

TEST(Recompute, AnInnerScopeKeepsNothingThatTheOuterOneCanMakeAgain) {
  at::Tensor w = at::randn({16, 16}).requires_grad_(true);
  saved::count(true);
  auto nested = [&](Recompute inner) {
    return recompute([&] {
      const at::Tensor h = w.exp().sin();
      return recompute(inner, [&] { return h.tanh().cos(); });
    });
  };
  for (Recompute inner : {Recompute::FULL, Recompute::SELECTIVE}) {
    w.mutable_grad().reset();
    at::Tensor y = nested(inner);
    EXPECT_EQ(saved::held(), 16 * 16 * 4);  // w
    y.sum().backward();
    const at::Tensor gradient = w.grad().clone();
    w.mutable_grad().reset();
    w.exp().sin().tanh().cos().sum().backward();
    EXPECT_TRUE(at::equal(gradient, w.grad()));
  }
  saved::count(false);
}

}  // namespace
}  // namespace fsdp::testing::tiles
