// Mixtures of experts, sharded and trained beside an unsharded copy that has every rank's tokens:
// experts are cut between ranks, and some get no token.
#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "fsdp/recompute.h"
#include "fsdp/world.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

namespace layers = fsdp::nn;

struct ExpertBlockImpl : torch::nn::Module {
  // The stream, and the loss so far.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& loss) {
    const auto [out, own] = mixture(norm(x));
    return {x + out, loss.defined() ? loss + own : own};
  }

  layers::RMSNorm norm = register_module("norm", layers::RMSNorm(16));
  layers::MoE mixture = register_module(
      "mixture",
      layers::MoE(layers::MoEOptions{
          .dim = 16, .ffn = 24, .experts = 7, .shared_ffn = 8, .balance = 0.1, .z = 0.01}));
};
TORCH_MODULE(ExpertBlock);

ModelCase mixtures() {
  auto build = [] {
    ExpertBlock first, second;
    torch::nn::ModuleList both(first, second);
    return built(both.ptr(), [first, second](const Batch& batch) mutable {
      auto [x, loss] = first(batch.x, at::Tensor());
      std::tie(x, loss) = second(x, loss);
      return mean_square(x, batch.y) + loss;
    });
  };
  auto batch = [](int step, int rank) {
    return Batch{step, random_normal(step, rank, 0, {9, 16}),
                 random_normal(step, rank, 1, {9, 16})};
  };
  return {.name = "mixtures",
          .build = build,
          .batch = batch,
          .wrap = wrap::modules<ExpertBlock>(),
          .tolerance = 4e-6,
          .bf16_tolerance = 3 * kBf16Epsilon};
}

TEST(ShardedMixtures, TrainAsTheUnshardedCopy) {
  for (const bool shared : {false, true}) {
    SideBySide both(mixtures(), {.device = test_device(), .share_host_memory = shared});
    both.train(4);
  }
}

TEST(ShardedMixtures, TrainInBfloat16) {
  SideBySide both(mixtures(), {.mixed_precision = bf16_precision(), .device = test_device()});
  both.train(2);
}

std::vector<at::Tensor> trained(const ShardOptions& options, std::optional<Recompute> mode) {
  const ModelCase model = mixtures();
  SideBySide both(model, options);
  if (mode)
    apply_activation_checkpointing(both.sharded(), RecomputePolicy(model.wrap, {.mode = *mode}));
  both.train(3);
  std::vector<at::Tensor> now;
  for (const char* name :
       {"0.mixture.gate.weight", "0.mixture.experts.gate_up_proj", "1.mixture.experts.down_proj",
        "1.mixture.shared_experts.up_proj.weight"})
    now.push_back(both.sharded().full_tensor(name));
  for (const auto& module : both.mine().module->modules())
    if (const auto* moe = module->as<layers::MoE>()) {
      now.push_back(moe->tally().load.clone());
      EXPECT_EQ(moe->tally().tokens.item<double>(), 27);  // each token once
    }
  return now;
}

void expect_equal(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  ASSERT_EQ(some.size(), others.size());
  for (size_t i = 0; i < some.size(); ++i) EXPECT_TRUE(at::equal(some[i], others[i])) << i;
}

TEST(ShardedMixtures, EveryStrategyGivesTheSameBits) {
  const auto first = trained({.device = test_device()}, {});
  for (const auto strategy : {ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::NO_SHARD})
    expect_equal(trained({.strategy = strategy, .device = test_device()}, {}), first);
}

TEST(ShardedMixtures, RecomputationKeepsRoutingAndBits) {
  const auto first = trained({.device = test_device()}, {});
  for (const auto mode : {Recompute::FULL, Recompute::SELECTIVE})
    expect_equal(trained({.device = test_device()}, mode), first);
}

TEST(ShardedMixtures, AccumulateGradients) {
  SideBySide both(mixtures(), {.device = test_device()});
  for (int step = 0; step < 2; ++step) {
    both.run(both.work(2 * step));
    both.run(both.work(2 * step + 1));
    both.step();
    both.zero_grad();
  }
}

}  // namespace
}  // namespace fsdp::testing
