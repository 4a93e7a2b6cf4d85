// Checkpoints loaded and saved between the steps of a CUDA graph.
#include "checkpoint/trained.h"
#include "fsdp/checkpoint.h"
#include "optim/graphed_trial.h"

namespace fsdp::testing {
namespace {

class GraphedCheckpoints : public GraphedSteps {};

TEST_F(GraphedCheckpoints, LoadingBetweenStepsRestoresTheState) {
  const SharedFolder folder;
  auto train = [&](bool graph) {
    Plan plan{.model = "transformer", .precision = bf16_precision(), .steps = 12};
    plan.step.graph = graph;
    Trial trial(plan);
    TrainStep step = step_of(trial);
    std::vector<double> losses;
    for (int i = 0; i < plan.steps; ++i) {
      if (i == 3) checkpoint::save(folder.path() / "c", trial.sharded, trial.optimizer.get());
      if (i == 8) checkpoint::load(folder.path() / "c", trial.sharded, trial.optimizer.get());
      losses.push_back(step(trial.inputs(i >= 8 ? i - 5 : i)).loss.item<double>());
    }
    EXPECT_EQ(step.recordings(), graph ? 1 : 0);
    step.wait();
    for (int i = 3; i < 7; ++i) EXPECT_EQ(losses[i], losses[i + 5]) << i;
    return trial.finish({.losses = losses});
  };
  Outcome recorded = train(true);
  expect_same(recorded, train(false));
}

// Ranks exchange the outcome of a save in an eager step, never in one that is being recorded.
TEST_F(GraphedCheckpoints, ABackgroundSaveDoesNotDisturbRecording) {
  const SharedFolder folder;
  Plan plan{.model = "transformer", .steps = 8};
  Trial trial(plan);
  TrainStep step = step_of(trial);
  checkpoint::AsyncSave saving;
  for (int i = 0; i < plan.steps; ++i) {
    if (i == plan.step.warmup)
      saving = checkpoint::save_async(folder.path() / "c", trial.sharded, trial.optimizer.get());
    step(trial.inputs(i));
  }
  step.wait();
  saving.wait();
  EXPECT_TRUE(step.replayed()) << step.why_eager();
  EXPECT_EQ(step.recordings(), 1);
  EXPECT_EQ(checkpoint::latest(folder.path()), folder.path() / "c");
}

}  // namespace
}  // namespace fsdp::testing
