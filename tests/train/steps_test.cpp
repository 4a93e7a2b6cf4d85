// Steps as graphs compared with eager ones, with a stand-in for CUDA graphs: micro-batches,
// outcomes that arrive a step later, non-finite numbers, signals.
#include "train/steps.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>

#include "data/folders.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "optim/work_again.h"
#include "shard/interrupted.h"
#include "shard/registry.h"
#include "train/memory_plan.h"

namespace fsdp::train {
namespace {

std::optional<World> joined;

const World& world() {
  if (!joined) joined = init({.backend = "shm"});
  return *joined;
}

struct Around : ::testing::Environment {
  void SetUp() override { stand_in.emplace(fsdp::testing::WorkAgain::seams()); }
  void TearDown() override {
    stand_in.reset();
    joined.reset();
  }
  std::optional<WithSeams> stand_in;
};
const auto* const around = ::testing::AddGlobalTestEnvironment(new Around);

TEST(InterruptedBackward, LeavesNothingBehind) {
  auto kept = std::make_shared<int>(0);
  const std::weak_ptr<int> seen = kept;
  {
    const at::Tensor x = torch::ones({2}, torch::requires_grad());
    const at::Tensor waits = x * 2, fails = x * 3;  // the later one runs first
    waits.register_hook([kept](const at::Tensor& gradient) { return gradient; });
    fails.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a rank died"); });
    EXPECT_THROW((waits + fails).sum().backward(), std::runtime_error);
  }
  kept.reset();
  EXPECT_FALSE(seen.expired());  // or this isn't needed any more
  shard::drop_interrupted_backward();
  EXPECT_TRUE(seen.expired());
}

TEST(InterruptedBackward, LeavesNoShardedModel) {
  const auto models = [] { return shard::registry::models().size(); };
  const size_t before = models();
  {
    torch::nn::Sequential model(torch::nn::Linear(2, 2));
    const Sharded sharded = fully_shard(model, {.device = world().device()});
    const at::Tensor x = torch::ones({1, 2}, torch::requires_grad());
    const at::Tensor waits = model->forward(x), fails = x * 3;
    fails.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a rank died"); });
    EXPECT_THROW((waits + fails).sum().backward(), std::runtime_error);
  }
  EXPECT_EQ(models(), before + 1);
  shard::drop_interrupted_backward();
  EXPECT_EQ(models(), before);
}

TEST(Crawling, IsThreeStepsInARowThatWereShortOfMemory) {
  Crawling run;
  EXPECT_FALSE(run.saw(0));
  EXPECT_FALSE(run.saw(2));
  EXPECT_FALSE(run.saw(3));
  EXPECT_FALSE(run.saw(3));  // one that wasn't
  EXPECT_FALSE(run.saw(4));
  EXPECT_FALSE(run.saw(5));
  EXPECT_TRUE(run.saw(9));
}

struct Case {
  explicit Case(models::ModelType model = models::ModelType::kLlama, int64_t micro_batch = 0,
                const std::function<void(Config&)>& change = {},
                const std::filesystem::path& directory = std::filesystem::temp_directory_path()) {
    config.model = {.type = model, .vocab = 50, .dim = 32, .layers = 2, .heads = 2, .width = 8};
    config.data.train = {"random"};
    config.data.seq = 12;
    config.train.steps = 100;
    config.train.batch = 6;
    config.train.micro_batch = micro_batch;
    config.train.clip = 0.7;
    if (change) change(config);
    training.emplace(assemble(world(), config, {directory}));
    feed = training->corpus->training(world(), 0);
  }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& item : training->task.module->named_parameters())
      all.push_back(training->sharded.full_tensor(item.key()).clone());
    return all;
  }

  Config config;
  std::optional<Training> training;
  std::unique_ptr<Feed> feed;
  bool signal = false;
};

std::vector<StepOutcome> all_of(Steps& steps) {
  std::vector<StepOutcome> all;
  while (auto outcome = steps.outcome()) all.push_back(*outcome);
  return all;
}

struct Trained {
  std::vector<StepOutcome> outcomes;
  std::vector<at::Tensor> parameters;
};

Trained trained(Case run, bool graphed) {
  Steps steps(*run.training, graphed, [&] { return run.signal; });
  for (int i = 0; i < 6; ++i) {
    run.training->scheduler->set_steps(10 * i);
    steps.take(run.feed->next(), /*eager=*/false);
  }
  steps.finish();
  return {all_of(steps), run.parameters()};
}

void expect_same(const Trained& a, const Trained& b) {
  ASSERT_EQ(a.outcomes.size(), b.outcomes.size());
  for (size_t i = 0; i < a.outcomes.size(); ++i) {
    EXPECT_EQ(a.outcomes[i].loss, b.outcomes[i].loss) << "step " << i;
    EXPECT_EQ(a.outcomes[i].norm, b.outcomes[i].norm) << "step " << i;
    EXPECT_EQ(a.outcomes[i].weight, b.outcomes[i].weight);
    EXPECT_TRUE(a.outcomes[i].updated && b.outcomes[i].updated);
  }
  for (size_t i = 0; i < a.parameters.size(); ++i)
    EXPECT_TRUE(at::equal(a.parameters[i], b.parameters[i])) << i;
}

TEST(Steps, AsGraphsGiveTheBitsOfEagerOnes) {
  expect_same(trained(Case(models::ModelType::kLlama), true),
              trained(Case(models::ModelType::kLlama), false));
  expect_same(trained(Case(models::ModelType::kMlp), true),
              trained(Case(models::ModelType::kMlp), false));
}

TEST(Steps, AsGraphsTakeMicroBatches) {
  expect_same(trained(Case(models::ModelType::kLlama, 2), true),
              trained(Case(models::ModelType::kLlama, 2), false));
}

// Prompts and completions of 3 to 24 bytes, packed into samples of 40.
class Examples {
 public:
  Examples() {
    std::string lines;
    for (int i = 0; i < 60; ++i)
      lines += R"({"prompt": ")" + std::string(i % 7 + 1, 'p') + R"(", "completion": ")" +
               std::string(i * 5 % 17 + 1, static_cast<char>('a' + i % 26)) + "\"}\n";
    file_ = folder_.write("examples.jsonl", lines);
  }
  Case packed(models::ModelType model, int64_t micro_batch = 0) const {
    return Case(
        model, micro_batch,
        [this](Config& config) {
          config.model.vocab = 0;
          config.data.train = {file_};
          config.data.seq = 40;
          config.data.packing = config.data.loss_mask = true;
        },
        folder_.path());
  }

 private:
  test::Folder folder_;
  std::string file_;
};

TEST(PackedSamples, HaveTheLossesOfDocumentsAlone) {
  const Examples examples;
  for (models::ModelType model : {models::ModelType::kLlama, models::ModelType::kGpt2}) {
    Case run = examples.packed(model);
    at::NoGradGuard no_grad;
    const Samples batch = run.feed->next();
    int64_t documents = 0;
    for (const Samples& part : micro_batches_of(batch, 4)) {
      const double together = run.training->task.loss_sum(part).item<double>();
      double alone = 0;
      for (int64_t row = 0; row < part.count; ++row)
        for (int64_t begin = 0, end = 0; begin < 40; begin = end, ++documents) {
          const at::Tensor same = part.documents[row].eq(part.documents[row][begin]);
          end = begin + same.sum().item<int64_t>();
          auto cut = [&](const at::Tensor& x) { return x[row].slice(0, begin, end).unsqueeze(0); };
          alone += run.training->task
                       .loss_sum({.inputs = cut(part.inputs), .targets = cut(part.targets)})
                       .item<double>();
        }
      const auto counted = static_cast<double>(part.targets.ne(-100).sum().item<int64_t>());
      EXPECT_GT(counted, 20);
      EXPECT_NEAR(together / counted, alone / counted, 1e-5);
    }
    EXPECT_GT(documents, 2 * batch.count);
  }
}

TEST(PackedSamples, InGraphsGiveTheBitsOfEagerSteps) {
  const Examples examples;
  const Trained eager = trained(examples.packed(models::ModelType::kLlama, 2), false);
  expect_same(trained(examples.packed(models::ModelType::kLlama, 2), true), eager);
  EXPECT_NE(eager.outcomes[0].weight, eager.outcomes[1].weight);
}

TEST(PackedSamples, CountTheOperationsOfTheirDocuments) {
  const Examples examples;
  const Case packed = examples.packed(models::ModelType::kLlama);
  const TrainTask whole = make_unfilled_task(packed.training->config, 257);
  EXPECT_LT(packed.training->task.flops_per_sample, 0.99 * whole.flops_per_sample);
  EXPECT_GT(packed.training->task.flops_per_sample, 0.5 * whole.flops_per_sample);
}

TEST(Steps, OutcomesOfGraphsComeOneStepLater) {
  Case run;
  Steps steps(*run.training, /*graphed=*/true, [&] { return run.signal; });
  steps.take(run.feed->next(), false);
  EXPECT_TRUE(steps.host_is_ahead());
  EXPECT_EQ(all_of(steps).size(), 0u);
  steps.take(run.feed->next(), false);
  EXPECT_EQ(all_of(steps).size(), 1u);
  steps.finish();
  EXPECT_EQ(all_of(steps).size(), 1u);
  steps.take(run.feed->next(), false);
  steps.take(run.feed->next(), /*eager=*/true);  // which settles the one before it
  EXPECT_FALSE(steps.host_is_ahead());
  EXPECT_EQ(all_of(steps).size(), 2u);
}

TEST(Steps, ASignalIsSeenInTheOutcomeOfItsStep) {
  Case run;
  Steps steps(*run.training, /*graphed=*/true, [&] { return run.signal; });
  steps.take(run.feed->next(), false);
  run.signal = true;
  steps.take(run.feed->next(), false);
  steps.finish();
  std::vector<StepOutcome> outcomes = all_of(steps);
  ASSERT_EQ(outcomes.size(), 2u);
  EXPECT_FALSE(outcomes[0].stop);
  EXPECT_TRUE(outcomes[1].stop);
}

TEST(Steps, ThatAreNotFiniteChangeNothing) {
  Case run(models::ModelType::kMlp);
  Steps steps(*run.training, /*graphed=*/true, [&] { return run.signal; });
  steps.take(run.feed->next(), false);
  std::vector<at::Tensor> before = run.parameters();
  Samples bad = run.feed->next();
  bad.inputs = bad.inputs.clone();
  bad.inputs[0][0] = std::numeric_limits<float>::quiet_NaN();
  steps.take(bad, false);
  steps.finish();
  std::vector<StepOutcome> outcomes = all_of(steps);
  ASSERT_EQ(outcomes.size(), 2u);
  EXPECT_TRUE(outcomes[0].updated);
  EXPECT_FALSE(outcomes[1].updated);
  std::vector<at::Tensor> after = run.parameters();
  for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i])) << i;
}

TEST(Steps, AreGraphsOnlyWhereThatCanBe) {
  Case run;
  EXPECT_FALSE(wants_graphs(*run.training, 1000));  // on the CPU
  run.training->config.train.graph = train::GraphMode::kOff;
  EXPECT_FALSE(wants_graphs(*run.training, 1000));
  run.training->config.train.graph = train::GraphMode::kOn;
  EXPECT_THROW(wants_graphs(*run.training, 1000), Error);
}

}  // namespace
}  // namespace fsdp::train
