// Offload with every test model (tied, frozen and odd parameters, units of several dtypes, units
// that some steps don't use, buffers), and with the less common ways to shard and to train.
#include <ATen/ATen.h>
#include <torch/utils.h>

#include <optional>

#include "fsdp/deferred_init.h"
#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "fsdp/train_step.h"
#include "optim/work_again.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/oracle.h"

namespace fsdp::testing::offload_models {
namespace {

const Offload kOptimizer{.optimizer = true};
const Offload kAll{.parameters = true, .optimizer = true};

void expect_same(const NamedTensors& seen, const NamedTensors& expected) {
  ASSERT_EQ(seen.size(), expected.size());
  for (size_t i = 0; i < seen.size(); ++i) {
    ASSERT_EQ(seen[i].first, expected[i].first);
    if (test_device().is_cpu())
      EXPECT_TRUE(at::equal(seen[i].second, expected[i].second)) << seen[i].first;
    else
      EXPECT_TRUE(at::allclose(seen[i].second, expected[i].second, 1e-2, 1e-3)) << seen[i].first;
  }
}

NamedTensors parameters_of(const Built& built, const Sharded& sharded) {
  NamedTensors values;
  const StateDict full = sharded.full_state_dict();
  for (const auto& [name, tensor] : built.parameters)
    values.emplace_back(name, full.at(name).full());
  return values;
}

void steps(const ModelCase& model, Built& built, const Sharded& sharded, Optimizer& optimizer) {
  for (int step = 0; step < 3; ++step) {
    built.loss(moved(model.batch(step, rank()), test_device())).backward();
    sharded.clip_grad_norm_(0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
}

NamedTensors trained(const ModelCase& model, ShardOptions options) {
  Built built = build_seeded(model);
  options.wrap = model.wrap;
  options.device = test_device();
  Sharded sharded = fully_shard(built.module, std::move(options));
  AdamW optimizer(sharded, {.lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1});
  steps(model, built, sharded, optimizer);
  return parameters_of(built, sharded);
}

TEST(OffloadedModels, LearnTheSameBits) {
  for (const ModelCase& model : model_cases()) {
    SCOPED_TRACE(model.name);
    if (!build_seeded(model).module) continue;  // TorchScript
    const auto expected = trained(model, {});
    for (const Offload& offload : {kOptimizer, kAll})
      expect_same(trained(model, {.offload = offload}), expected);
    Offload some = kAll;
    some.fraction = 0.5;
    expect_same(trained(model, {.offload = some}), expected);
  }
}

// Our layers accumulate a gradient inside the matrix product, which rounds differently from adding
// two products: so a gradient in host memory must be copied back first.
TEST(OffloadedModels, AccumulateTheSameBitsInLayersOfOurs) {
  const auto train = [](Offload offload, bool quiet) {
    torch::manual_seed(5);
    torch::nn::Sequential model;
    for (int i = 0; i < 3; ++i) model->push_back(nn::Linear(24, 24));
    Sharded sharded = fully_shard(model, {.wrap = wrap::modules<nn::Linear>(),
                                          .device = test_device(),
                                          .offload = std::move(offload)});
    AdamW optimizer(sharded, {.lr = 1e-2, .eps = 1e-3});
    NamedTensors seen;
    for (int step = 0; step < 3; ++step) {
      for (int part = 0; part < 3; ++part) {
        std::optional<NoSync> no_sync;
        if (quiet && part == 1) no_sync.emplace(sharded.no_sync());
        torch::manual_seed(10 * step + part + rank());
        model->forward(at::randn({8, 24}, test_device())).tanh().square().mean().backward();
      }
      seen.emplace_back("gradient", sharded.full_grad("1.weight").cpu());
      seen.emplace_back("norm", sharded.clip_grad_norm_(0.1).cpu());
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& item : model->named_parameters())
      seen.emplace_back(item.key(), sharded.full_tensor(item.key()).cpu());
    return seen;
  };
  for (bool quiet : {false, true}) {
    SCOPED_TRACE(quiet);
    const NamedTensors expected = train({}, quiet);
    Offload some = kAll;
    some.fraction = 0.5;
    for (const Offload& offload : {Offload{.gradients = true}, kOptimizer, kAll, some})
      expect_same(train(offload, quiet), expected);
  }
}

TEST(OffloadedModels, TrainedByTorchFollowTheOracle) {
  for (const char* name : {"transformer", "odd", "lora", "mixed_types", "resnet"})
    for (const Offload& offload : {kOptimizer, kAll}) {
      SCOPED_TRACE(name);
      SideBySide both(model_case(name), {.offload = offload});
      both.train(3);
    }
}

TEST(OffloadedModels, TakeStepsOfNoWeight) {
  if (world_size() == 1) GTEST_SKIP() << "nobody would have data";
  for (const Offload& offload : {kOptimizer, kAll}) {
    SideBySide both(model_case("transformer"), {.offload = offload});
    both.train(2);
    const int without = world_size() - 1;
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
}

TEST(OffloadedModels, MayBeShardedBottomUp) {
  const auto train = [](const Offload& blocks, const Offload& root) {
    const ModelCase& model = model_case("transformer");
    torch::manual_seed(kSeed);
    Transformer net;
    for (size_t i = 0; i < net->blocks->size(); ++i)
      fully_shard(net->block(i), {.device = test_device(), .offload = blocks});
    Sharded sharded = fully_shard(net, {.device = test_device(), .offload = root});
    AdamW optimizer(sharded, {.lr = 1e-2, .eps = 1e-3});
    for (int step = 0; step < 3; ++step) {
      auto batch = moved(model.batch(step, rank()), test_device());
      net->loss(batch.x, batch.y).backward();
      sharded.clip_grad_norm_(0.5);
      optimizer.step();
      optimizer.zero_grad();
    }
    NamedTensors values;
    for (const auto& item : net->named_parameters())
      values.emplace_back(item.key(), sharded.full_tensor(item.key()).cpu());
    return values;
  };
  const auto expected = train({}, {});
  expect_same(train(kAll, {}), expected);
  expect_same(train({}, kOptimizer), expected);
  expect_same(train(kOptimizer, kAll), expected);
}

TEST(OffloadedModels, MayBeBuiltWithoutMemory) {
  const ModelCase& model = model_case("transformer");
  const auto expected = trained(model, {});
  for (const Offload& offload : {kOptimizer, kAll}) {
    torch::manual_seed(kSeed);
    Transformer net = deferred_init([] { return Transformer(); });
    Built built = testing::built(
        net.ptr(), [net](const Batch& batch) mutable { return net->loss(batch.x, batch.y); });
    Sharded sharded =
        fully_shard(net, {.wrap = model.wrap, .device = test_device(), .offload = offload});
    AdamW optimizer(sharded, {.lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1});
    steps(model, built, sharded, optimizer);
    expect_same(parameters_of(built, sharded), expected);
  }
}

TEST(OffloadedModels, LetReduceHooksSeeTheirGradients) {
  const ModelCase& model = model_case("transformer");
  std::vector<NamedTensors> seen;
  for (const Offload& offload : {Offload{}, kOptimizer, kAll}) {
    Built built = build_seeded(model);
    Sharded sharded = fully_shard(
        built.module, {.wrap = model.wrap, .device = test_device(), .offload = offload});
    sharded.set_gradient_divide_factor(2.0 * world_size());
    int calls = 0;
    sharded.set_reduce_hook([&](at::Tensor shard, const std::string&) {
      shard.mul_(2);
      ++calls;
    });
    AdamW optimizer(sharded, {.lr = 1e-2, .eps = 1e-3});
    steps(model, built, sharded, optimizer);
    EXPECT_GT(calls, 0);
    seen.push_back(parameters_of(built, sharded));
  }
  expect_same(seen[1], seen[0]);
  expect_same(seen[2], seen[0]);
}

class SignDescent : public Optimizer {
 public:
  explicit SignDescent(const Sharded& sharded) : Optimizer(sharded, {}, 1e-3, 0.0, {}) {}

 private:
  std::function<void()> prepare(const Update& what) const override {
    return [pieces = what.pieces, lr = groups().front().lr] {
      for (const auto& piece : pieces)
        piece.master.sub_(piece.grad.narrow(0, piece.begin, piece.master.numel()).sign(), lr);
    };
  }
};

TEST(OffloadedModels, TakeOptimizersOfTheUser) {
  const ModelCase& model = model_case("transformer");
  std::vector<NamedTensors> seen;
  for (const Offload& offload : {Offload{}, kOptimizer, kAll}) {
    Built built = build_seeded(model);
    Sharded sharded = fully_shard(
        built.module, {.wrap = model.wrap, .device = test_device(), .offload = offload});
    SignDescent optimizer(sharded);
    steps(model, built, sharded, optimizer);
    seen.push_back(parameters_of(built, sharded));
  }
  expect_same(seen[1], seen[0]);
  expect_same(seen[2], seen[0]);
}

TEST(OffloadedModels, TakeEagerStepsInsteadOfGraphs) {
  std::optional<WithSeams> stand_in;
  if (test_device().is_cpu()) stand_in.emplace(WorkAgain::seams());
  const ModelCase& model = model_case("transformer");
  std::vector<NamedTensors> seen;
  for (const Offload& offload : {Offload{}, kAll}) {
    Built built = build_seeded(model);
    Sharded sharded = fully_shard(
        built.module, {.wrap = model.wrap, .device = test_device(), .offload = offload});
    AdamW optimizer(sharded, {.lr = 1e-2, .eps = 1e-3});
    TrainStep step(sharded, optimizer, [&](const TrainStep::Inputs& inputs) {
      return built.loss({0, inputs[0], inputs[1]});
    });
    for (int i = 0; i < 6; ++i) {
      Batch batch = model.batch(i, rank());
      step(TrainStep::Inputs{batch.x, batch.y});
    }
    EXPECT_EQ(step.replayed(), !offload.any());
    EXPECT_EQ(contains(step.why_eager(), "offloaded"), offload.any()) << step.why_eager();
    seen.push_back(parameters_of(built, sharded));
  }
  expect_same(seen[1], seen[0]);
}

}  // namespace
}  // namespace fsdp::testing::offload_models
