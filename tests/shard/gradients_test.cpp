// Everything users do with gradients between backward and step, each against the oracle:
// accumulation, clearing, weighting, changing.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "shard/uses.h"

namespace fsdp::testing {
namespace {

class Gradients : public Uses {};

INSTANTIATE_TEST_SUITE_P(Memory, Gradients, ::testing::Bool(), memory_name);

// --- accumulation ---

TEST_P(Gradients, AccumulationWithoutCommunication) {
  for (const char* name : {"mlp", "transformer", "lora"}) {
    SCOPED_TRACE(name);
    SideBySide both(model_case(name), options());
    for (int step = 0; step < 3; ++step) {
      auto micro = [&](Built& model, int rank, int i) {
        auto loss = model.loss(batch(10 * step + i, rank, name));
        loss.backward();
        return loss;
      };
      both.run(
          [&](Built& model, int rank) {
            {
              auto guard = both.sharded().no_sync();
              micro(model, rank, 0);
              EXPECT_FALSE(both.sharded().full_grad(model.parameters[1].first).defined());
              micro(model, rank, 1);
            }
            return micro(model, rank, 2);
          },
          [&](Built& model, int rank) {
            micro(model, rank, 0);
            micro(model, rank, 1);
            return micro(model, rank, 2);
          });
      both.step();
      both.zero_grad();
    }
  }
}

TEST_P(Gradients, AccumulationSwitchedByACall) {
  SideBySide both(model_case("mlp"), options());
  both.sharded().set_requires_gradient_sync(false);
  both.run_mine(both.work(0));
  both.sharded().set_requires_gradient_sync(true);
  auto loss = both.run_mine(both.work(1));
  both.oracle().run(both.work(0));
  both.oracle().run(both.work(1));
  both.expect_same_loss(loss);
  both.expect_same_gradients();
}

TEST_P(Gradients, AccumulationWithCommunication) {
  SideBySide both(model_case("transformer"), options());
  for (int step = 0; step < 3; ++step) {
    both.run(both.work(10 * step));
    both.run(both.work(10 * step + 1));  // accumulates and compares the sum
    both.step();
    both.zero_grad();
  }
}

TEST_P(Gradients, ZeroGradForgetsWhatWasAccumulated) {
  SideBySide both(model_case("mlp"), options());
  {
    auto guard = both.sharded().no_sync();
    both.run_mine(both.work(5));
  }
  both.sharded().zero_grad();
  both.run_mine(both.work(6));
  both.sharded().zero_grad();
  both.train(2);
}

TEST_P(Gradients, ZeroGradToNoneAndToZero) {
  SideBySide both(model_case("mlp"), options());
  both.run(both.work(0));
  both.sharded().zero_grad(/*set_to_none=*/false);
  auto gradient = both.sharded().full_grad("layers.3.weight");
  ASSERT_TRUE(gradient.defined());
  EXPECT_EQ(gradient.abs().sum().item<double>(), 0);
  both.oracle().zero_grad();
  both.run(both.work(1));
  both.sharded().zero_grad(/*set_to_none=*/true);
  EXPECT_FALSE(both.sharded().full_grad("layers.3.weight").defined());
  for (const auto& shard : both.sharded().parameters()) EXPECT_FALSE(shard.grad().defined());
}

TEST_P(Gradients, TheModulesOwnZeroGrad) {
  for (bool set_to_none : {true, false}) {
    SideBySide both(model_case("mlp"), options());
    for (int step = 0; step < 3; ++step) {
      both.run(both.work(step));
      both.step();
      both.mine().module->zero_grad(set_to_none);
      both.oracle().zero_grad();
    }
  }
}

TEST_P(Gradients, TheOptimizersOwnZeroGrad) {
  SideBySide both(model_case("mlp"), options());
  torch::optim::SGD optimizer(both.sharded().parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    both.run(both.work(step));
    optimizer.zero_grad();
    both.oracle().zero_grad();
  }
}

// --- gradients changed by the user ---

TEST_P(Gradients, TheDivideFactor) {
  SideBySide both(model_case("mlp"), options());
  both.sharded().set_gradient_divide_factor(2.0);
  auto loss = both.run_mine(both.work(0));
  both.oracle().run(both.work(0));
  both.oracle().scale_gradients(world_size() / 2.0);
  both.expect_same_loss(loss);
  both.expect_same_gradients();
  both.zero_grad();
  both.sharded().set_gradient_divide_factor(0);
  both.train(2, 1);
}

TEST_P(Gradients, TheReduceHookSeesAndChangesEveryShard) {
  SideBySide both(model_case("mlp"), options());
  std::map<std::string, int> seen;
  both.sharded().set_reduce_hook([&](at::Tensor shard, const std::string& unit) {
    ++seen[unit];
    shard.mul_(3);
  });
  auto loss = both.run_mine(both.work(0));
  both.oracle().run(both.work(0));
  both.oracle().scale_gradients(3);
  both.expect_same_loss(loss);
  both.expect_same_gradients();
  EXPECT_EQ(seen.size(), 8u);
  for (const auto& [unit, times] : seen) EXPECT_EQ(times, 1) << unit;
}

TEST_P(Gradients, UnequalWeights) {
  SideBySide both(model_case("transformer"), options());
  std::vector<double> weights;
  for (int r = 0; r < world_size(); ++r) weights.push_back(r + 1);
  for (int step = 0; step < 3; ++step) {
    both.run(
        [&](Built& model, int rank) {
          auto loss = model.loss(batch(step, rank, "transformer"));
          both.sharded().scale_loss(loss, weights[rank]).backward();
          return loss;
        },
        both.work(step), weights);
    both.step();
    both.zero_grad();
  }
}

TEST_P(Gradients, ARankWithoutDataTakesAStepOfNoWeight) {
  if (world_size() == 1) GTEST_SKIP() << "nobody would have data";
  SideBySide both(model_case("transformer"), options());
  both.train(2);
  int without = world_size() - 1;
  both.run(
      [&](Built& model, int rank) {
        if (rank != without) return both.work(2)(model, rank);
        both.sharded().zero_weight_step();
        return at::Tensor();
      },
      [&](Built& model, int rank) {
        return rank == without ? at::Tensor() : both.work(2)(model, rank);
      });
  both.step();
  both.zero_grad();
  both.train(1, 3);
}

TEST_P(Gradients, HooksOfTheUserOnParameters) {
  SideBySide both(model_case("mlp"), options());
  auto doubled = [&](Built& model) {
    return model.parameter("layers.2.weight").register_hook([](at::Tensor gradient) {
      return gradient * 2;
    });
  };
  doubled(both.mine());
  doubled(both.oracle().plain());
  both.train(2);
}

struct CountHook : torch::autograd::PostAccumulateGradHook {
  explicit CountHook(int& count) : count(count) {}
  void operator()(const torch::autograd::Variable&) override { ++count; }
  int& count;
};

TEST_P(Gradients, APostAccumulateHookOfTheUserLivesOn) {
  const auto& model = model_case("mlp");
  auto mine = build_seeded(model);
  int count = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(mine.parameter("layers.1.weight"),
                                                 std::make_unique<CountHook>(count));
  auto shard_options = options();
  shard_options.wrap = model.wrap;
  shard_options.device = test_device();
  SideBySide both(model, mine, fully_shard(mine.module, shard_options),
                  Oracle(model, world_size(), {}, test_device()));
  both.train(2);
  EXPECT_EQ(count, 2);
}

}  // namespace
}  // namespace fsdp::testing
