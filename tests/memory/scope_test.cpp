// fsdp::recompute: a piece of code as a region.
#include <ATen/ATen.h>
#include <torch/autograd.h>

#include "fsdp/recompute.h"
#include "memory/side_by_side.h"
#include "shard/models.h"
#include "shard/saved_activations.h"
#include "shard/tape_hook.h"

namespace fsdp::testing::scopes {
namespace {

constexpr int64_t kRows = 64, kWidth = 8;

at::Tensor long_way(at::Tensor h) {
  return h.tanh().exp().sigmoid().sin();
}

struct TwoImpl : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(kWidth, kWidth));
  nn::Linear b = register_module("b", nn::Linear(kWidth, kWidth));
  at::Tensor x = register_buffer("x", at::randn({kRows, kWidth}));
};
TORCH_MODULE(Two);

using Loss = std::function<at::Tensor(TwoImpl&)>;

Outcome outcome(const Loss& loss, bool policy = false) {
  return run(
      [&](Recompute) {
        Two two;
        return Subject{two.ptr(), [two, loss]() mutable { return loss(*two); },
                       RecomputePolicy(wrap::modules<nn::Linear>())};
      },
      {.recompute = policy});
}

at::Tensor plain_loss(TwoImpl& two) {
  at::Tensor h = long_way(at::dropout(two.a(two.x), 0.2, true));
  return long_way(two.b(h)).square().sum();
}

TEST(Recompute, APieceOfCodeIsTheSameAndKeepsLess) {
  Outcome plain = outcome(plain_loss);
  for (Recompute mode : {Recompute::FULL, Recompute::SELECTIVE}) {
    Outcome again = outcome([mode](TwoImpl& two) {
      at::Tensor h = recompute(
          mode, [&](const at::Tensor& x) { return long_way(at::dropout(two.a(x), 0.2, true)); },
          two.x);
      return long_way(two.b(h)).square().sum();
    });
    expect_equal(plain, again);
    EXPECT_LT(again.kept, plain.kept);
  }
}

TEST(Recompute, ReturnsWhatTheCodeReturns) {
  auto [sum, text] =
      recompute([](int a, int b) { return std::pair(a + b, std::string("both")); }, 2, 3);
  EXPECT_EQ(sum, 5);
  EXPECT_EQ(text, "both");
}

TEST(Recompute, ScopesNest) {
  Outcome plain = outcome(plain_loss);
  auto nested = [](TwoImpl& two) {
    return recompute([&] {
      at::Tensor h = recompute([&] {
        at::Tensor y = two.a(two.x);
        return long_way(recompute([&] { return at::dropout(y, 0.2, true); }));
      });
      return long_way(two.b(h)).square().sum();
    });
  };
  Outcome again = outcome(nested);
  expect_equal(plain, again);
  EXPECT_LT(again.kept, plain.kept);
  expect_equal(plain, outcome(nested, /*policy=*/true));  // and around modules that are regions
}

TEST(Recompute, AScopeInsideARegionOfAPolicyIsTheSame) {
  auto inside = [](TwoImpl& two) {
    at::Tensor h = two.a(two.x);
    h = recompute([&] { return long_way(at::dropout(h, 0.2, true)); });
    return long_way(two.b(h)).square().sum();
  };
  expect_equal(outcome(plain_loss), outcome(inside, /*policy=*/true));
}

// Runs `code` in a scope of this mode; nullopt: plainly.
at::Tensor in_scope(std::optional<Recompute> mode, const std::function<at::Tensor()>& code) {
  return mode ? recompute(*mode, code) : code();
}

using TwoScopes =
    std::function<at::Tensor(TwoImpl&, std::optional<Recompute>, std::optional<Recompute>)>;

void expect_same_in_scopes(const TwoScopes& loss, std::vector<Recompute> outers) {
  auto with = [&](std::optional<Recompute> outer, std::optional<Recompute> inner) {
    return outcome([&, outer, inner](TwoImpl& two) { return loss(two, outer, inner); });
  };
  Outcome plain = with({}, {});
  for (Recompute outer : outers)
    for (Recompute inner :
         {Recompute::FULL, Recompute::SELECTIVE, Recompute::OFFLOAD, Recompute::FULL_OFFLOAD}) {
      SCOPED_TRACE(std::to_string(int(outer)) + " around " + std::to_string(int(inner)));
      expect_equal(plain, with(outer, inner));
    }
}

TEST(Recompute, AWriteInAnInnerScopeIsNotLostInTheOuterOne) {
  expect_same_in_scopes(
      [](TwoImpl& two, auto outer, auto inner) {
        return in_scope(outer, [&] {
          at::Tensor y = two.a(two.x) * 2, z = y * 3;
          in_scope(inner, [&] { return y.add_(1); });
          return long_way(two.b(long_way(y) * z)).square().sum();
        });
      },
      {Recompute::FULL, Recompute::SELECTIVE, Recompute::OFFLOAD, Recompute::FULL_OFFLOAD});
}

TEST(Recompute, AWriteInTheOuterScopeDoesNotReachWhatAnInnerOneHasRead) {
  expect_same_in_scopes(
      [](TwoImpl& two, auto outer, auto inner) {
        return in_scope(outer, [&] {
          at::Tensor y = two.a(two.x) * 2;
          at::Tensor z = in_scope(inner, [&] { return long_way(y + 1); });
          y.add_(1);
          return long_way(two.b(long_way(y) * z)).square().sum();
        });
      },
      {Recompute::FULL, Recompute::SELECTIVE, Recompute::FULL_OFFLOAD});  // that record the write
}

TEST(Recompute, AnExceptionLeavesTheScope) {
  at::Tensor w = at::randn({4, 4}).requires_grad_(true);
  EXPECT_THROW(recompute([&] {
                 at::Tensor y = w.exp().tanh();
                 EXPECT_TRUE(shard::taping());
                 throw std::runtime_error("");
                 return y;
               }),
               std::runtime_error);
  EXPECT_FALSE(shard::taping());
  at::Tensor y = recompute([&] { return w.exp().tanh(); });
  EXPECT_FALSE(shard::taping());
  y.sum().backward();
  at::Tensor gradient = w.grad().clone();
  w.mutable_grad() = at::Tensor();
  w.exp().tanh().sum().backward();
  EXPECT_TRUE(at::equal(gradient, w.grad()));
}

TEST(Recompute, ABackwardInsideTheCodeIsTheSame) {
  auto loss_of = [](bool recomputed) {
    return [recomputed](TwoImpl& two) {
      at::Tensor x = two.x.clone().requires_grad_(true);
      auto energy = [&] { return long_way(two.a(x)); };
      auto force = [&] {
        at::Tensor y = energy();
        at::Tensor slope =
            torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
        return y + long_way(slope);
      };
      at::Tensor h = recomputed ? recompute(force) : force();
      return long_way(two.b(h)).square().sum();
    };
  };
  expect_equal(outcome(loss_of(false)), outcome(loss_of(true)));
}

TEST(Recompute, ADroppedGraphLeavesNothing) {
  at::Tensor w = at::randn({64, 64}).requires_grad_(true);
  shard::saved_activations::count(true);
  {
    at::Tensor y = recompute([&] { return w.exp().tanh().mm(w); });
    EXPECT_GT(shard::saved_activations::held(), 0);
  }
  EXPECT_EQ(shard::saved_activations::held(), 0);
  shard::saved_activations::count(false);
}

}  // namespace
}  // namespace fsdp::testing::scopes
