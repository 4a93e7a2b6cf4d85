// Real runs of `fsdp train` on models with experts.
#include <gtest/gtest.h>

#include <algorithm>

#include "train/runs.h"

namespace fsdp::train {
namespace {

using launch::Folder;
using launch::has;

void set_value(Words& command, const std::string& flag, const std::string& value) {
  *(std::find(command.begin(), command.end(), flag) + 1) = value;
}

Words experts_run(const Folder& folder, const std::string& run, const Words& more) {
  Words command = tiny_run(folder, run, 6);
  set_value(command, "--optim.warmup_steps", "0");
  return command + Words{"--model.type",
                         "dots1",
                         "--model.experts",
                         "6",
                         "--model.experts_per_token",
                         "3",
                         "--model.expert_ffn",
                         "16",
                         "--model.dense_layers",
                         "1",
                         "--model.bias_rate",
                         "0.05",
                         "--optim.schedule",
                         "constant",
                         "--log.compare_ranks",
                         "3"} +
         more;
}

void expect_near_losses(const Folder& folder, const std::string& run, const std::string& other) {
  const std::vector<double> a = losses(folder, run), b = losses(folder, other);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 2e-5) << run << ", step " << i + 1;
}

// The balance loss is of the tokens that a rank has at once; without it ranks and micro-batches
// change nothing. Biases follow the load of all ranks and are in checkpoints.
TEST(Train, ExpertsLearnTheSameOnAnyNumberOfRanksAndResumed) {
  Folder folder;
  const Words even = {"--model.balance", "0"};
  for (int ranks : {1, 2, 3}) {
    const std::string name = "experts-" + std::to_string(ranks);
    Words more = even;
    if (ranks == 3) more = more + Words{"--train.micro_batch", "2"};
    const Said said = train(ranks, experts_run(folder, name, more));
    ASSERT_EQ(said.code, 0) << said.err;
    EXPECT_TRUE(has(said.out, "dots1, ")) << said.out;
    EXPECT_TRUE(has(said.out, " of them per token")) << said.out;
    expect_near_losses(folder, name, "experts-1");
  }
  Words first = experts_run(folder, "parts", even);
  set_value(first, "--steps", "3");
  const Said begun = train(1, first);
  ASSERT_EQ(begun.code, 0) << begun.err;
  const Said resumed = train(2, {"--dir", folder / "parts", "--resume", "--steps", "6"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  expect_near_losses(folder, "parts", "experts-1");
}

TEST(Train, MetricsHaveTheLoadOfExperts) {
  Folder folder;
  const Said said = train(2, experts_run(folder, "run", {"--activations.mode", "full"}));
  ASSERT_EQ(said.code, 0) << said.err;
  const auto lines = metrics(folder, "run");
  for (const auto& line : lines) {
    if (!line.contains("loss")) continue;
    EXPECT_GE(line["expert_load_most"].get<double>(), 1);
    EXPECT_LE(line["expert_load_least"].get<double>(), 1);
    EXPECT_GT(line["router_entropy"].get<double>(), 1);  // ln 6 = 1.79 at the most
    EXPECT_LT(line["router_entropy"].get<double>(), 1.8);
    EXPECT_EQ(line["dropped_tokens"].get<double>(), 0);
    EXPECT_EQ(line.contains("expert_load"), line["step"].get<int>() % 3 == 0);
    if (!line.contains("expert_load")) continue;
    ASSERT_EQ(line["expert_load"].size(), 1);  // one of two blocks has experts
    double sum = 0;
    for (const auto& load : line["expert_load"][0]) sum += load.get<double>();
    EXPECT_NEAR(sum, 6, 0.01);
  }
  const Said none = train(1, tiny_run(folder, "none", 2) + Words{"--model.experts", "4"});
  EXPECT_NE(none.code, 0);
  EXPECT_TRUE(has(none.err, "model.experts")) << none.err;
}

}  // namespace
}  // namespace fsdp::train
