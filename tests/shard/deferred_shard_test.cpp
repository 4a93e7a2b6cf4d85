// A model built under deferred_init and then sharded has the bits of plain construction, on any
// number of ranks.
#include <torch/torch.h>

#include "fsdp/deferred_init.h"
#include "fsdp/fully_shard.h"
#include "shard/deferred.h"
#include "shard/models.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

template <typename Build>
void expect_plain_bits(Build build, ShardOptions options) {
  options.device = test_device();
  torch::manual_seed(11);
  auto plain = build();
  auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  torch::manual_seed(11);
  auto model = deferred_init(build);
  EXPECT_TRUE(at::globalContext().defaultGenerator(at::kCPU).get_state().equal(state));
  for (const auto& p : model->parameters()) EXPECT_TRUE(shard::deferred::is_deferred(p));
  auto sharded = fully_shard(model, options);
  for (const auto& p : plain->named_parameters())
    EXPECT_TRUE(at::equal(sharded.full_tensor(p.key()).cpu(), p.value())) << p.key();
  auto buffers = model->named_buffers();
  for (const auto& b : plain->named_buffers())
    EXPECT_TRUE(at::equal(buffers[b.key()].cpu(), b.value())) << b.key();
}

TEST(DeferredShards, AreThoseOfPlainConstruction) {
  for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD}) {
    expect_plain_bits([] { return Transformer(); },
                      {.wrap = wrap::modules<Block>(), .strategy = strategy});
    expect_plain_bits(
        [] { return nn::Sequential(nn::Conv2d(3, 8, 3), nn::BatchNorm2d(8), nn::Linear(7, 13)); },
        {.wrap = wrap::always(), .strategy = strategy});
  }
}

TEST(DeferredShards, TrainAsPlainOnes) {
  std::vector<at::Tensor> losses;
  for (bool deferred : {false, true}) {
    torch::manual_seed(3);
    auto build = [] { return nn::Sequential(nn::Linear(6, 9), nn::Tanh(), nn::Linear(9, 4)); };
    auto model = deferred ? deferred_init(build) : build();
    auto sharded =
        fully_shard(model, {.wrap = wrap::modules<nn::Linear>(), .device = test_device()});
    for (int step = 0; step < 3; ++step) {
      auto x = at::ones({2, 6}, test_device()) * (step + 1);
      auto loss = model->forward(x).square().mean();
      loss.backward();
      for (const auto& p : sharded.parameters()) {
        at::NoGradGuard no_grad;
        p.data().sub_(p.grad(), 0.1);
      }
      sharded.zero_grad();
      losses.push_back(loss.detach().cpu());
    }
  }
  for (int step = 0; step < 3; ++step) EXPECT_TRUE(at::equal(losses[step], losses[step + 3]));
}

}  // namespace
}  // namespace fsdp::testing
