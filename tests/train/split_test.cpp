// A resumed run keeps its validation split: a checkpoint of a version that held out other samples
// is refused, one that is independent of the split continues.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "fsdp/error.h"
#include "train/training.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

class SplitOfARun : public ::testing::Test {
 protected:
  // One world for all cases: it lasts until the memory of the last model in it is freed.
  static void SetUpTestSuite() { world_ = init({.backend = "shm"}); }
  static void TearDownTestSuite() { world_ = {}; }

  SplitOfARun() {
    std::string name = (fs::temp_directory_path() / "fsdp-split-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    top_ = name;
    std::ofstream text(top_ / "text");
    for (int i = 0; i < 2000; ++i) text << "line " << i << " of the text\n";
  }
  ~SplitOfARun() override { fs::remove_all(top_); }

  Training training(const std::function<void(Config&)>& change = {}) {
    Config config;
    config.model = {
        .type = models::ModelType::kLlama, .dim = 16, .layers = 1, .heads = 2, .ffn = 16};
    config.data.train = {(top_ / "text").string()};
    config.data.seq = 16;
    config.train.steps = 100;
    config.train.batch = 4;
    config.checkpoint.async = false;
    if (change) change(config);
    return assemble(world_, config, {top_ / "run"});
  }
  // A checkpoint after 3 steps, without the keys of `missing`.
  fs::path saved(Training& training, const std::string& missing) {
    save(training, {.step = 3, .position = 12, .tokens = 192}, /*must=*/true);
    fs::path first = training.directory.checkpoint(3);
    checkpoint::SaveOptions options;
    options.extra = checkpoint::read_extra(first);
    options.extra.erase(missing);
    checkpoint::save(top_ / "old", training.sharded, training.optimizer.get(), options);
    return top_ / "old";
  }

  static inline World world_;
  fs::path top_;
};

TEST_F(SplitOfARun, OfThisVersionIsResumed) {
  Training run = training();
  RunState state = restore(run, saved(run, "nothing"));
  EXPECT_EQ(state.step, 3);
  EXPECT_EQ(state.position, 12);
}

TEST_F(SplitOfARun, OfAnEarlierVersionIsRefused) {
  Training run = training();
  fs::path old = saved(run, "split");
  try {
    restore(run, old);
    FAIL() << "resumed";
  } catch (const Error& problem) {
    EXPECT_NE(problem.message().find(old.string()), std::string::npos) << problem.what();
    EXPECT_NE(problem.message().find("held out other samples"), std::string::npos);
    EXPECT_NE(problem.hint().find("--init-from"), std::string::npos);
  }
}

TEST_F(SplitOfARun, DoesNotMatterWithDataOfItsOwnOrNone) {
  std::ofstream(top_ / "valid") << "a text of its own for validation\n";
  for (auto change : {+[](Config& config) { config.data.valid = {config.data.train[0]}; },
                      +[](Config& config) { config.data.valid_share = 0; },
                      +[](Config& config) {
                        config.data.train = {"random"};
                        config.model.vocab = 50;
                      }}) {
    Training run = training(change);
    EXPECT_EQ(restore(run, saved(run, "split")).step, 3);
    fs::remove_all(top_ / "old");
    fs::remove_all(top_ / "run");
  }
}

// The samples of all evaluations, and those of an epoch of training, by their first token's place.
TEST_F(SplitOfARun, EvaluatesTheSameSamplesForEverySeed) {
  auto validation = [&](int64_t seed) {
    Training run = training([&](Config& config) { config.train.seed = seed; });
    return run.corpus->validation(world_)->next().inputs;
  };
  EXPECT_TRUE(torch::equal(validation(1), validation(2)));
  Training run = training();
  EXPECT_EQ(run.corpus->split_rule(), "stretches-64");
  int64_t samples = run.corpus->samples_per_epoch(), held = run.corpus->validation_batches() * 4;
  EXPECT_NEAR(static_cast<double>(held), 0.02 * static_cast<double>(samples + held), 5);
}

}  // namespace
}  // namespace fsdp::train
