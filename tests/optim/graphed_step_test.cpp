// TrainStep against the same steps written out, and against its own eager steps. Every rank runs
// these tests. Over nccl, steps are recorded as CUDA graphs and replayed, and must give the same
// bits as eager ones. Without a GPU, a stand-in for a graph repeats the recorded work.
#include <ATen/ATen.h>
#include <torch/nn/modules/dropout.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "base/seams.h"
#include "optim/graphed_trial.h"
#include "shard/capture.h"
#include "shard/told.h"

namespace fsdp::testing {
namespace {

TEST_F(GraphedSteps, GiveAnMlpTheNumbersOfStepsByHand) {
  expect_same_every_way({.model = "mlp"});
}

TEST_F(GraphedSteps, GiveATransformerTheNumbersOfStepsByHand) {
  expect_same_every_way({.model = "transformer", .step = {.clip = 0.5}});
}

TEST_F(GraphedSteps, GiveAResNetWithBatchNormTheNumbersOfStepsByHand) {
  Outcome outcome = expect_same_every_way({.model = "resnet"});
  EXPECT_FALSE(outcome.buffers.empty());
}

TEST_F(GraphedSteps, WorkWithBf16ParametersAndSgd) {
  Plan plan{.model = "transformer", .precision = bf16_precision(), .sgd = true};
  Outcome unrecorded = eager(plan), recorded = graphed(plan);
  expect_same(recorded, unrecorded);
  expect_same(unrecorded, by_hand(plan), on_gpu() ? 1e-2 : 0);
}

TEST_F(GraphedSteps, AreTheSameWhereBlocksAreComputedAgain) {
  Outcome kept = graphed({.model = "transformer", .step = {.clip = 0.5}});
  for (Recompute mode : {Recompute::FULL, Recompute::SELECTIVE}) {
    Plan plan{.model = "transformer", .step = {.clip = 0.5}, .recompute = mode};
    expect_same(expect_same_every_way(plan), kept);
  }
}

TEST_F(GraphedSteps, StayEagerWhereActivationsAreOffloaded) {
  if (!on_gpu()) GTEST_SKIP() << "the stand-in records without running anything";
  const WithSeams everything({.smallest_offloaded = 1});
  for (Recompute mode : {Recompute::OFFLOAD, Recompute::FULL_OFFLOAD}) {
    Plan plan{.model = "transformer", .step = {.clip = 0.5}, .recompute = mode};
    Outcome recorded;
    const std::string said = told([&] { recorded = graphed(plan); });
    EXPECT_FALSE(recorded.replayed);
    EXPECT_TRUE(contains(recorded.why_eager, "offloaded activations")) << recorded.why_eager;
    EXPECT_TRUE(contains(said, "so steps stay eager")) << said;
    expect_same(recorded, eager(plan));
  }
}

TEST_F(GraphedSteps, ClipAndFollowTheLearningRate) {
  Plan plan{.model = "transformer",
            .step = {.clip = 0.05},
            .set = [](Optimizer& optimizer, int step) { optimizer.set_lr(1e-2 / (1 + step)); }};
  Outcome clipped = expect_same_every_way(plan);
  for (double norm : clipped.norms) EXPECT_GT(norm, 0.05);
  plan.set = {};
  EXPECT_NE(graphed(plan).losses, clipped.losses);
}

TEST_F(GraphedSteps, AccumulateOverMicroBatches) {
  for (int64_t parts : {2, 4})
    expect_same_every_way({.model = "transformer", .step = {.clip = 0.5}, .micro_batches = parts});
}

TEST_F(GraphedSteps, AccumulateWholeGradientsWhereTheyAreReducedOnce) {
  Plan plan{.model = "mlp", .step = {.reduce_once = true}, .micro_batches = 3};
  Outcome unrecorded = eager(plan), recorded = graphed(plan);
  expect_same(recorded, unrecorded);
  plan.step.reduce_once = false;
  expect_same(recorded, eager(plan), 1e-5);
  if (world_size() > 1) {
    EXPECT_LT(recorded.traffic.reduce_scatter, eager(plan).traffic.reduce_scatter);
  }
}

TEST_F(GraphedSteps, CountBytesAndUpdatesAsEagerOnesDo) {
  Plan plan{.model = "transformer", .micro_batches = 2};
  Outcome unrecorded = eager(plan), recorded = graphed(plan);
  EXPECT_EQ(recorded.traffic.all_gather, unrecorded.traffic.all_gather);
  EXPECT_EQ(recorded.traffic.reduce_scatter, unrecorded.traffic.reduce_scatter);
  for (int64_t updates : recorded.updates) EXPECT_EQ(updates, plan.steps);
}

TEST_F(GraphedSteps, AreRecordedAgainForOtherShapes) {
  Plan plan{.model = "mlp", .step = {.warmup = 2}, .steps = 14};
  plan.change = [](Inputs& inputs, int step) {
    if (step >= 5 && step % 3 != 0)
      for (at::Tensor& input : inputs) input = input.narrow(0, 0, 2);
  };
  Outcome unrecorded = eager(plan), recorded;
  const std::string said = told([&] { recorded = graphed(plan); });
  EXPECT_EQ(contains(said, "was recorded again, for inputs of [2, "), rank() == 0) << said;
  expect_same(recorded, unrecorded);
  expect_same(unrecorded, by_hand(plan), on_gpu() ? 1e-5 : 0);
  EXPECT_EQ(recorded.recordings, 2);
}

TEST_F(GraphedSteps, KeepNoMoreShapesThanAsked) {
  Plan plan{.model = "mlp", .step = {.warmup = 1, .shapes = 1}, .steps = 12};
  plan.change = [](Inputs& inputs, int step) {
    for (at::Tensor& input : inputs) input = input.narrow(0, 0, 1 + step / 4);
  };
  Outcome recorded = graphed(plan);
  expect_same(recorded, eager(plan));
  EXPECT_EQ(recorded.recordings, 3);
}

TEST_F(GraphedSteps, SkipWhatIsNotFinite) {
  Plan plan{.model = "mlp", .step = {.clip = 1.0, .warmup = 2}};
  plan.change = [](Inputs& inputs, int step) {
    // On one rank only; all ranks skip the step.
    bool here = rank() == world_size() - 1;
    if (here && (step == 1 || step == 6)) inputs[0][0][0] = std::numeric_limits<float>::quiet_NaN();
    if (here && step == 7) inputs[0][0][0] = std::numeric_limits<float>::infinity();
  };
  Outcome recorded = graphed(plan);
  EXPECT_EQ(recorded.skipped, (std::vector<int>{0, 1, 0, 0, 0, 0, 1, 1, 0, 0}));
  for (int64_t updates : recorded.updates) EXPECT_EQ(updates, 7);
  expect_same(recorded, eager(plan));
  expect_same(eager(plan), by_hand(plan), on_gpu() ? 1e-5 : 0);
}

TEST_F(GraphedSteps, AreNotDisturbedByWhatIsDoneBetweenThem) {
  std::vector<double> seen;
  Plan plan{.model = "transformer"};
  const ModelCase& transformer = model_case("transformer");
  plan.between = [&](Built& model, int step) {
    if (step % 2 == 0) return;
    torch::NoGradGuard no_grad;
    Batch batch = moved(transformer.batch(1000, rank()), test_device());
    seen.push_back(model.loss(batch).item<double>());
  };
  Outcome unrecorded = eager(plan);
  std::vector<double> eagerly = std::exchange(seen, {});
  Outcome recorded = graphed(plan);
  expect_same(recorded, unrecorded);
  EXPECT_EQ(seen, eagerly);
  EXPECT_NE(seen.front(), seen.back());  // the model learns
}

// Targets and numbers that a loss adds up, both different in each step and on each rank.
TEST_F(GraphedSteps, DivideByWeightsThatDifferAndAddUpTallies) {
  std::vector<std::vector<double>> losses(2), weights(2), tallies(2);
  for (const bool graph : {false, true}) {
    Plan plan{.model = "mlp", .micro_batches = 2};
    Trial trial(plan);
    trial.sharded.set_gradient_divide_factor(1.0);
    const at::Tensor tally = at::zeros({2}, at::TensorOptions(at::kDouble).device(test_device()));
    TrainStep step(
        trial.sharded, *trial.optimizer,
        [&](const Inputs& inputs) {
          const at::Tensor loss = trial.built.loss({0, inputs[0], inputs[1]}) * 8;
          tally.add_(at::stack({at::ones_like(loss), loss}).detach());
          return loss;
        },
        {.graph = graph, .sum = true, .weighted = true, .weights_differ = true, .tally = tally});
    double summed = 0;
    for (int i = 0; i < plan.steps; ++i) {
      step(trial.inputs(i), /*weight=*/1 + i + rank());
      step.wait();
      const StepOutcome outcome = *step.outcome();
      losses[graph].push_back(outcome.loss);
      weights[graph].push_back(outcome.weight);
      ASSERT_EQ(outcome.tally.size(), 2u);
      tallies[graph].push_back(outcome.tally[1]);
      const double ranks = world_size();
      summed = ranks * (1 + i) + ranks * (ranks - 1) / 2;
      EXPECT_EQ(outcome.weight, summed);
      EXPECT_EQ(outcome.tally[0], 2 * ranks);
      EXPECT_NEAR(outcome.tally[1] / summed, outcome.loss, 1e-6);
    }
    EXPECT_EQ(step.replayed(), graph) << step.why_eager();
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(weights[0], weights[1]);
  EXPECT_EQ(tallies[0], tallies[1]);
}

TEST_F(GraphedSteps, DropOtherElementsInEveryReplay) {
  struct NetImpl : nn::Module {
    nn::Linear linear = register_module("linear", nn::Linear(64, 64));
    nn::Dropout dropout = register_module("dropout", nn::Dropout(0.5));
  };
  torch::manual_seed(3);
  auto net = std::make_shared<NetImpl>();
  Sharded sharded = fully_shard(net, {.device = test_device()});
  AdamW optimizer(sharded, {.lr = 0.0, .weight_decay = 0.0});
  TrainStep step(sharded, optimizer, [&](const Inputs& inputs) {
    return net->dropout(net->linear(inputs[0])).square().mean();
  });
  at::Tensor x = random_normal(0, rank(), 0, {8, 64});
  std::set<double> losses;
  for (int i = 0; i < 10; ++i) losses.insert(step(Inputs{x}).loss.item<double>());
  EXPECT_EQ(losses.size(), 10u);
  EXPECT_TRUE(step.replayed()) << step.why_eager();
}

TEST_F(GraphedSteps, StayEagerWhereTheyCannotBeRecorded) {
  WorkAgain::refuses = true;
  Plan plan{.model = "transformer", .step = {.clip = 0.5}};
  Trial trial(plan);
  int calls = 0;
  TrainStep step(
      trial.sharded, *trial.optimizer,
      [&](const Inputs& inputs) {
        at::Tensor loss = trial.built.loss({0, inputs[0], inputs[1]});
        ++calls;
        return loss.item<float>() > 1e9 ? loss * 0 : loss;  // the host waits for the device
      },
      plan.step);
  std::vector<double> losses;
  for (int i = 0; i < plan.steps; ++i) losses.push_back(step(trial.inputs(i)).loss.item<double>());
  expect_same_numbers(losses, eager(plan).losses, 0);
  EXPECT_EQ(calls, plan.steps + (on_gpu() ? 1 : 0));
  EXPECT_FALSE(step.why_eager().empty());
  EXPECT_FALSE(step.replayed());
  // The generator and the allocator work as if nothing had been tried.
  at::Tensor drawn = at::rand({1000}, at::TensorOptions().device(test_device()));
  EXPECT_GT(drawn.max().item<double>(), drawn.min().item<double>());
}

// Fails in backward, after some gradients have arrived: on the host, or (on a GPU that records)
// because the host waits for the device.
struct Failing : torch::autograd::Function<Failing> {
  static inline bool on_host = false;
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    if (on_host) throw std::runtime_error("failed on purpose");
    if (gradients[0].sum().item<double>() > 1e30) return {};
    return gradients;
  }
};

at::Tensor failing_loss(Built& model, const Inputs& inputs) {
  return model.loss({0, Failing::apply(inputs[0].to(test_device()).requires_grad_()),
                     inputs[1].to(test_device())});
}

TEST_F(GraphedSteps, AFailureInBackwardLeavesAUsableModel) {
  WorkAgain::refuses = true;
  Failing::on_host = false;
  Plan plan{.model = "mlp"};
  Trial trial(plan);
  TrainStep step(trial.sharded, *trial.optimizer,
                 [&](const Inputs& inputs) { return failing_loss(trial.built, inputs); });
  std::vector<double> losses;
  for (int i = 0; i < plan.steps; ++i) losses.push_back(step(trial.inputs(i)).loss.item<double>());
  expect_same_numbers(losses, eager(plan).losses, 0);
  EXPECT_FALSE(step.replayed());
}

TEST_F(GraphedSteps, RecoveryLeavesNothingBehindOfAStepThatFailedAnywhere) {
  Plan plan{.model = "mlp"};
  Trial trial(plan);
  TrainStep step(trial.sharded, *trial.optimizer, [&](const Inputs& inputs) {
    return trial.built.loss({0, inputs[0], inputs[1]});
  });
  shard::Model& model = *shard::model_of(trial.sharded);
  std::vector<double> losses;
  for (int i = 0; i < plan.steps; ++i) {
    Inputs inputs = trial.inputs(i).front();
    if (i % 3 == 1) {  // units gathered, gradients accumulated, an unused clip factor
      auto no_sync = trial.sharded.no_sync();
      trial.built.loss({0, inputs[0].to(test_device()), inputs[1].to(test_device())}).backward();
      trial.built.loss({0, inputs[0].to(test_device()), inputs[1].to(test_device())});
      shard::recover(model);
    } else if (i % 3 == 2) {
      Failing::on_host = true;
      EXPECT_THROW(failing_loss(trial.built, inputs).backward(), std::exception);
      shard::recover(model);
    }
    EXPECT_FALSE(shard::has_gradients(model));
    for (const auto& unit : model.lock()->units)
      EXPECT_EQ(unit->state, shard::Unit::State::kSharded);
    losses.push_back(step(inputs).loss.item<double>());
  }
  expect_same_numbers(losses, eager(plan).losses, 0);
}

TEST_F(GraphedSteps, AreEagerWhileSomebodyWatchesOrHoldsUnits) {
  Plan plan{.model = "transformer"};
  Trial trial(plan);
  TrainStep step(trial.sharded, *trial.optimizer, [&](const Inputs& inputs) {
    return trial.built.loss({0, inputs[0], inputs[1]});
  });
  std::vector<double> losses;
  for (int i = 0; i < plan.steps; ++i) {
    trial.sharded.record_events(i == 5);
    losses.push_back(step(trial.inputs(i)).loss.item<double>());
    EXPECT_EQ(step.replayed(), i > 2 && i != 5) << i;
    if (i == 5) {
      EXPECT_FALSE(trial.sharded.events().empty());
    }
  }
  expect_same_numbers(losses, eager(plan).losses, 0);
}

TEST_F(GraphedSteps, GiveUpRecordingWhereShapesChangeAllTheTime) {
  Plan plan{.model = "mlp", .step = {.warmup = 1, .shapes = 1}, .steps = 20};
  plan.change = [](Inputs& inputs, int step) {  // two of each shape in turn, and only one is kept
    for (at::Tensor& input : inputs) input = input.narrow(0, 0, 1 + step / 2 % 3);
  };
  Outcome recorded;
  const std::string said = told([&] { recorded = graphed(plan); });
  EXPECT_EQ(contains(said, "steps are eager from now on"), rank() == 0) << said;
  EXPECT_EQ(recorded.recordings, 4);
  EXPECT_FALSE(recorded.replayed);
  EXPECT_TRUE(contains(recorded.why_eager, "too often")) << recorded.why_eager;
  expect_same(recorded, eager(plan));
}

TEST_F(GraphedSteps, DropGradientsThatWereThereBefore) {
  Plan plan{.model = "mlp"};
  Trial trial(plan);
  TrainStep step(trial.sharded, *trial.optimizer, [&](const Inputs& inputs) {
    return trial.built.loss({0, inputs[0], inputs[1]});
  });
  std::vector<double> norms;
  for (int i = 0; i < plan.steps; ++i) {
    Inputs inputs = trial.inputs(i).front();
    trial.built.loss({0, inputs[0].to(test_device()), inputs[1].to(test_device())}).backward();
    norms.push_back(step(inputs).norm.item<double>());
  }
  expect_same_numbers(norms, eager(plan).norms, 0);
}

TEST_F(GraphedSteps, RefuseWhatCannotBeMeant) {
  Plan plan{.model = "mlp", .micro_batches = 2};
  Trial trial(plan), other(plan);
  auto loss = [&](const Inputs& inputs) { return trial.built.loss({0, inputs[0], inputs[1]}); };
  expect_error([&] { TrainStep(trial.sharded, *other.optimizer, loss, {}); }, {"another model"});
  expect_error([&] { TrainStep(trial.sharded, *trial.optimizer, {}, {}); }, {"loss is empty"});
  expect_error([&] { TrainStep(trial.sharded, *trial.optimizer, loss, {.weighted = true}); },
               {"sum is false", "set_gradient_divide_factor"});
  TrainStep step(trial.sharded, *trial.optimizer, loss, plan.step);
  expect_error([&] { step(std::vector<Inputs>{}); }, {"no micro-batches"});
  TrainStep unreduced(trial.sharded, *trial.optimizer, [&](const Inputs& inputs) {
    return trial.built.loss({0, inputs[0], inputs[1]}).expand({2});
  });
  expect_error([&] { unreduced(trial.inputs(0).front()); }, {"single number"});
  trial.sharded.reshard();  // on every rank
}

// All ranks together against one process that gets the batches of all.
TEST_F(GraphedSteps, OfAllRanksLearnWhatOneRankLearnsFromTheWholeBatch) {
  const ModelCase& model = model_case("transformer");
  Built plain = build_reference(model, {}, test_device());
  std::vector<at::Tensor> parameters;
  for (const auto& [name, parameter] : plain.parameters) parameters.push_back(parameter);
  torch::optim::AdamW reference(parameters,
                                torch::optim::AdamWOptions(1e-2).eps(1e-3).weight_decay(0.0));
  Built mine = build_seeded(model);
  Sharded sharded =
      fully_shard(mine.module, ShardOptions{.wrap = model.wrap, .device = test_device()});
  AdamW optimizer(sharded, {.lr = 1e-2, .eps = 1e-3, .weight_decay = 0.0});
  TrainStep step(sharded, optimizer, [&](const Inputs& inputs) {
    return mine.loss({0, inputs[0], inputs[1]});
  });
  for (int i = 0; i < 10; ++i) {
    double expected = 0;
    for (int r = 0; r < world_size(); ++r) {
      at::Tensor part = plain.loss(moved(model.batch(i, r), test_device())) / world_size();
      expected += part.item<double>();
      part.backward();
    }
    reference.step();
    reference.zero_grad();
    Batch batch = model.batch(i, rank());
    EXPECT_NEAR(step({batch.x, batch.y}).loss.item<double>(), expected, 1e-4) << "step " << i;
  }
  EXPECT_TRUE(step.replayed()) << step.why_eager();
}

}  // namespace
}  // namespace fsdp::testing
