// Uses of a TrainStep beyond taking steps: our models at several sequence lengths, accumulation,
// and changes between steps that invalidate a recording.
#include <torch/utils.h>

#include "fsdp/models/llama.h"
#include "optim/graphed_trial.h"
#include "shard/told.h"

namespace fsdp::testing {
namespace {

// Takes the plan's steps with `change` before the seventh, recorded and eagerly: results are the
// same, and a message says that recordings are dropped.
void expect_followed(Plan plan, const std::function<void(Trial& trial)>& change) {
  auto train = [&](bool graph) {
    plan.step.graph = graph;
    Trial trial(plan);
    TrainStep step = step_of(trial);
    std::vector<double> losses;
    for (int i = 0; i < plan.steps; ++i) {
      if (i == 6) {
        EXPECT_EQ(step.replayed(), graph);
        change(trial);
      }
      losses.push_back(step(trial.inputs(i)).loss.item<double>());
    }
    EXPECT_EQ(step.replayed(), graph) << step.why_eager();
    EXPECT_EQ(step.recordings(), graph ? 2 : 0);
    step.wait();
    return trial.finish({.losses = losses});
  };
  Outcome recorded;
  const std::string said = told([&] { recorded = train(true); });
  EXPECT_EQ(contains(said, "will be recorded again"), rank() == 0) << said;
  expect_same(recorded, train(false));
}

TEST_F(GraphedSteps, FollowWhatIsTrained) {
  expect_followed({.model = "transformer", .steps = 12}, [](Trial& trial) {
    trial.built.parameters.front().second.requires_grad_(false);
  });
}

// A parameter that is first trained when a step would be recorded gets its states in an eager step:
// otherwise every replay would create them, as zeros.
TEST_F(GraphedSteps, MakeNoStatesInARecording) {
  auto train = [](bool graph) {
    Plan plan{.model = "transformer", .steps = 12};
    plan.step.graph = graph;
    Trial trial(plan);
    auto freeze = [&](bool frozen) {
      for (auto& [name, parameter] : trial.built.parameters)
        if (&name != &trial.built.parameters.front().first) parameter.requires_grad_(!frozen);
    };
    freeze(true);
    TrainStep step = step_of(trial);
    std::vector<double> losses;
    for (int i = 0; i < plan.steps; ++i) {
      if (i == plan.step.warmup) freeze(false);
      losses.push_back(step(trial.inputs(i)).loss.item<double>());
    }
    EXPECT_EQ(step.replayed(), graph) << step.why_eager();
    step.wait();
    return trial.finish({.losses = losses});
  };
  expect_same(train(true), train(false));
}

TEST_F(GraphedSteps, FollowMastersThatAreHandedOut) {
  expect_followed({.model = "transformer", .precision = bf16_precision(), .steps = 12},
                  [](Trial& trial) { trial.sharded.parameters(); });
}

TEST_F(GraphedSteps, FollowHowGradientsAreReduced) {
  expect_followed({.model = "mlp", .steps = 12},
                  [](Trial& trial) { trial.sharded.set_gradient_divide_factor(3); });
}

TEST_F(GraphedSteps, FollowHooksOfParameters) {
  expect_followed({.model = "transformer", .steps = 12}, [](Trial& trial) {
    trial.built.parameters.front().second.register_hook([](const at::Tensor& g) { return g / 2; });
  });
}

// Each rank leaves out another layer of the unit; its gradient counts as zero in replays, too.
TEST_F(GraphedSteps, OfRanksThatUseDifferentParameters) {
  auto train = [](bool graph) {
    torch::manual_seed(kSeed);
    auto layers = nn::ModuleList(nn::Linear(8, 8), nn::Linear(8, 8), nn::Linear(8, 8));
    auto loss = [layers](const Inputs& inputs) {
      auto h = inputs[0];
      for (size_t i = 0; i < layers->size(); ++i)
        if (static_cast<int>(i) != rank() % 3)
          h = layers->ptr<nn::LinearImpl>(i)->forward(h).tanh();
      return h.square().mean();
    };
    auto sharded = fully_shard(layers.ptr(), {.device = test_device()});
    AdamW optimizer(sharded, {.lr = 1e-2});
    TrainStep step(sharded, optimizer, loss, {.graph = graph});
    for (int i = 0; i < 8; ++i) step(Inputs{random_normal(i, rank(), 0, {4, 8}).to(test_device())});
    EXPECT_EQ(step.replayed(), graph) << step.why_eager();
    step.wait();
    return sharded.full_state_dict();
  };
  auto recorded = train(true), eager = train(false);
  for (const auto& [name, value] : eager) EXPECT_TRUE(at::equal(recorded.at(name), value)) << name;
}

// A forward between steps leaves copies of parameters, and layers that expect a gradient. A replay
// must neither read the copies nor wait for the gradients.
TEST_F(GraphedSteps, TakeNothingFromAForwardBeforeThem) {
  for (bool grad_mode : {false, true}) {
    SCOPED_TRACE(grad_mode);
    Plan plan{.model = "transformer"};
    if (test_world().size() % 2 == 0) plan.reshard = 2;
    plan.between = [&](Built& model, int) {
      at::AutoGradMode mode(grad_mode);
      model.loss(moved(model_case("transformer").batch(1000, rank()), test_device()));
    };
    Outcome recorded = graphed(plan);
    EXPECT_TRUE(recorded.replayed) << recorded.why_eager;
    Outcome unrecorded = eager(plan);
    recorded.memory = unrecorded.memory;  // a recording has its own buffers for gathers
    expect_same(recorded, unrecorded);
  }
}

// A step may use a model that is trained elsewhere. It stays eager and adds to that model's
// gradients, or, if they were zeroed before, it is recorded.
TEST_F(GraphedSteps, LeaveGradientsOfOtherModelsToThem) {
  if (!on_gpu()) GTEST_SKIP() << "nothing is recorded";
  auto train = [](bool graph, bool zeroed) {
    Plan plan{.model = "mlp", .steps = 8};
    plan.step.graph = graph;
    Trial trial(plan), other(plan);
    TrainStep step(
        trial.sharded, *trial.optimizer,
        [&](const Inputs& inputs) {
          return trial.built.loss({0, inputs[0], inputs[1]}) +
                 other.built.loss({0, inputs[0], inputs[1]});
        },
        plan.step);
    other.built.loss(moved(model_case("mlp").batch(1000, rank()), test_device())).backward();
    for (int i = 0; i < plan.steps; ++i) {
      if (zeroed) other.optimizer->zero_grad();
      step(trial.inputs(i));
    }
    step.wait();
    EXPECT_EQ(step.replayed(), graph && zeroed) << step.why_eager();
    EXPECT_EQ(contains(step.why_eager(), "gradients its model already had"), graph && !zeroed);
    const std::string name = other.built.parameters.front().first;
    at::Tensor gradient = zeroed ? at::zeros({1}) : other.sharded.full_grad(name).clone();
    return std::pair(trial.finish({}), gradient);
  };
  for (bool zeroed : {false, true}) {
    auto [recorded, its_gradient] = train(true, zeroed);
    auto [eager, gradient] = train(false, zeroed);
    expect_same(recorded, eager);
    EXPECT_TRUE(at::equal(its_gradient, gradient));
  }
}

TEST_F(GraphedSteps, FollowAnOptimizerThatCountsOnTheHostAgain) {
  if (!on_gpu()) GTEST_SKIP() << "it always does";
  expect_followed({.model = "mlp", .steps = 12},
                  [](Trial& trial) { trial.optimizer->set_capturable(false); });
}

TEST_F(GraphedSteps, AccumulateInAResNet) {
  Outcome resnet = graphed({.model = "resnet", .step = {.clip = 1.0}, .micro_batches = 3});
  EXPECT_TRUE(resnet.replayed) << resnet.why_eager;
  expect_same(resnet, eager({.model = "resnet", .step = {.clip = 1.0}, .micro_batches = 3}));
}

TEST_F(GraphedSteps, SayWhenMicroBatchesDiffer) {
  Plan plan{.model = "mlp", .micro_batches = 2};
  Trial trial(plan);
  TrainStep step = step_of(trial);
  const std::string said = told([&] {
    for (int i = 0; i < plan.steps; ++i) {
      std::vector<Inputs> parts = trial.inputs(i);
      for (at::Tensor& input : parts[1]) input = input.narrow(0, 0, 1);
      step(parts);
    }
  });
  EXPECT_FALSE(step.replayed());
  EXPECT_EQ(contains(said, "have different shapes"), rank() == 0) << said;
  EXPECT_EQ(said.find("have different shapes"), said.rfind("have different shapes"));
}

TEST_F(GraphedSteps, SayWhenNoShapeComesTwice) {
  Plan plan{.model = "mlp", .steps = 70};
  Trial trial(plan);
  TrainStep step = step_of(trial);
  const std::string said = told([&] {
    for (int i = 0; i < plan.steps; ++i) {
      Inputs inputs = trial.inputs(0).front();
      for (at::Tensor& input : inputs) input = input.narrow(0, 0, 1).repeat({i + 1, 1});
      step(inputs);
    }
  });
  EXPECT_EQ(step.recordings(), 0);
  EXPECT_EQ(contains(said, "Pad the inputs to a few lengths"), rank() == 0) << said;
}

// --- our own layers, which write gradients into the reduction buffers ---

struct Lengths {
  int64_t of(int step) const { return step % 2 == 0 ? first : second; }
  int64_t first, second;
  int64_t between = 0;  // tokens of a pass without gradients after each step; 0: none
};

std::vector<double> train_llama(bool graph, const Lengths& lengths, Wire wire = Wire::PLAIN) {
  torch::manual_seed(5);
  models::Llama llama(models::LlamaConfig{
      .vocab = 61, .dim = 64, .layers = 3, .heads = 4, .kv_heads = 2, .ffn = 96});
  ShardOptions options{.wrap = wrap::modules<models::LlamaBlock>(), .device = test_device()};
  if (on_gpu()) options.mixed_precision = bf16_precision();
  options.mixed_precision.gather = options.mixed_precision.reduce = wire;
  Sharded sharded = fully_shard(llama, options);
  AdamW optimizer(sharded, {.lr = 3e-3, .eps = 1e-4, .groups = {no_decay()}});
  TrainStep step(sharded, optimizer,
                 [&](const Inputs& inputs) {
                   return llama->loss_sum({.ids = inputs[0]}, inputs[1]) /
                          static_cast<double>(inputs[1].numel());
                 },
                 {.clip = 1.0, .graph = graph});
  std::vector<double> losses;
  for (int i = 0; i < 16; ++i) {
    std::vector<Inputs> parts;
    for (int part = 0; part < 2; ++part)
      parts.push_back({random_integers(part, rank(), 0, 61, {2, lengths.of(i)}),
                       random_integers(part, rank(), 1, 61, {2, lengths.of(i)})});
    losses.push_back(step(parts).loss.item<double>());
    if (lengths.between == 0) continue;
    torch::NoGradGuard no_grad;
    at::Tensor ids = random_integers(9, rank(), 0, 61, {1, lengths.between}).to(test_device());
    losses.push_back(llama->loss_sum({.ids = ids}, ids).item<double>());
  }
  EXPECT_EQ(step.replayed(), graph) << step.why_eager();
  return losses;
}

TEST_F(GraphedSteps, TrainALlama) {
  std::vector<double> eagerly = train_llama(false, {16, 16});
  expect_same_numbers(train_llama(true, {16, 16}), eagerly, on_gpu() ? 5e-3 : 0);
  EXPECT_LT(eagerly.back(), eagerly.front() - 0.1);
}

TEST_F(GraphedSteps, TrainALlamaInOneByteOnTheWire) {
  for (Wire wire : {Wire::FP8, Wire::INT8})
    expect_same_numbers(train_llama(true, {16, 16}, wire), train_llama(false, {16, 16}, wire),
                        on_gpu() ? 5e-3 : 0);
}

// A recording reads the RoPE tables at their old address, whatever lengths came since.
TEST_F(GraphedSteps, TrainALlamaOfSeveralLengths) {
  const Lengths lengths{12, 20, 33};
  expect_same_numbers(train_llama(true, lengths), train_llama(false, lengths), on_gpu() ? 5e-3 : 0);
}

}  // namespace
}  // namespace fsdp::testing
