// Real runs of `fsdp train`: interrupted, resumed, on other numbers of ranks, under other
// launchers.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "paths.h"
#include "train/runs.h"

namespace fsdp::train {
namespace {

using launch::Folder;
using launch::has;
using launch::Launched;
namespace fs = std::filesystem;

void expect_near(const std::vector<double>& a, const std::vector<double>& b, double bound) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], bound) << "step " << i + 1;
}

// --- the same losses, however it is run ---

// Losses of tiny_run, computed by one process when this test was written.
const std::vector<double> kGolden = {5.53042, 5.49671, 5.42252, 5.32238, 5.20425, 5.07396, 4.93882,
                                     4.80109, 4.66260, 4.55185, 4.42570, 4.31184, 4.23374, 4.14961,
                                     4.07548, 4.01555, 3.98214, 3.94409, 3.91959, 3.90090};

TEST(Train, LossesAreTheSameOnOneTwoThreeAndFourRanks) {
  Folder folder;
  for (int ranks : {1, 2, 3, 4}) {
    std::string name = "run-" + std::to_string(ranks);
    Said said = train(ranks, tiny_run(folder, name, 20));
    ASSERT_EQ(said.code, 0) << said.err;
    if (ranks > 1) expect_near(losses(folder, name), losses(folder, "run-1"), 1e-5);
  }
  expect_near(losses(folder, "run-1"), kGolden, 2e-4);  // other CPUs round differently
}

TEST(Train, MicroBatchesAndStrategiesChangeNoLoss) {
  Folder folder;
  ASSERT_EQ(train(1, tiny_run(folder, "plain", 6)).code, 0);
  std::vector<double> plain = losses(folder, "plain");
  struct Variant {
    const char* name;
    int ranks;
    Words flags;
  } variants[] = {
      {"micro", 1, {"--train.micro_batch", "4"}},
      {"micro-2", 2, {"--train.micro_batch", "2"}},
      {"grad-op", 2, {"--shard.strategy", "shard_grad_op"}},
      {"no-shard", 2, {"--shard.strategy", "no_shard"}},
      {"hybrid", 4, {"--shard.strategy", "hybrid_shard", "--shard.shard_ranks", "2"}},
      {"by-size", 2, {"--shard.wrap", "size", "--shard.wrap_min_params", "5000"}},
      {"gathered", 2, {"--shard.share_host_memory", "false"}},
      {"recomputed", 2, {"--activations.mode", "full", "--activations.every", "2"}},
      {"selective", 1, {"--activations.mode", "selective"}},
      {"feed-forward", 1, {"--activations.mode", "feed_forward", "--activations.keep_last", "1"}},
      {"activations", 2, {"--activations.mode", "offload"}},
      {"long", 2, {"--activations.mode", "long", "--activations.tile", "10"}},
      {"tiles", 3, {"--activations.tile", "24"}},
      {"offload", 2, {"--offload.optimizer", "true", "--offload.fraction", "0.7"}},
      {"away", 2, {"--offload.optimizer", "true", "--offload.parameters", "true"}},
      {"parts", 2, {"--offload.gradients", "true", "--offload.parameters", "true"}},
      {"disk", 2, {"--offload.optimizer", "true", "--offload.directory", folder.path()}}};
  for (const Variant& variant : variants) {
    Said said = train(variant.ranks, tiny_run(folder, variant.name, 6) + variant.flags);
    ASSERT_EQ(said.code, 0) << variant.name << said.err;
    expect_near(losses(folder, variant.name), plain, 1e-5);
  }
}

TEST(Train, RanksThatShareSequencesChangeNoLoss) {
  Folder folder;
  const Words few = {"--model.heads", "4", "--model.kv_heads", "2"};
  ASSERT_EQ(train(1, tiny_run(folder, "plain", 6) + few).code, 0);
  struct Variant {
    const char* name;
    int ranks;
    Words flags;
  } variants[] = {
      {"two", 2, {"--context.size", "2", "--train.micro_batch", "4"}},
      {"four", 4, {"--context.size", "4", "--activations.mode", "full"}},
      {"ring", 2, {"--context.size", "2", "--context.kind", "ring", "--activations.mode", "full"}},
      {"groups",
       4,
       {"--context.size", "2", "--shard.strategy", "hybrid_shard", "--shard.shard_ranks", "2"}}};
  const auto plain = metrics(folder, "plain");
  for (const Variant& variant : variants) {
    Said said = train(variant.ranks, tiny_run(folder, variant.name, 6) + few + variant.flags);
    ASSERT_EQ(said.code, 0) << variant.name << said.err;
    const auto shared = metrics(folder, variant.name);
    ASSERT_EQ(shared.size(), plain.size());
    for (size_t i = 0; i < plain.size(); ++i)
      for (const char* key : {"loss", "grad_norm", "tokens"})
        EXPECT_NEAR(shared[i][key].get<double>(), plain[i][key].get<double>(), 1e-5)
            << variant.name;
    EXPECT_NEAR(shared[5]["eval_loss"].get<double>(), plain[5]["eval_loss"].get<double>(), 1e-5);
  }
}

TEST(Train, PackedExamplesMayBeShared) {
  Folder folder;
  std::ofstream lines(folder / "examples.jsonl");
  for (int i = 0; i < 200; ++i)
    lines << R"({"prompt": ")" << std::string(i % 7 + 1, 'p') << R"(", "completion": ")"
          << std::string(i * 5 % 17 + 1, static_cast<char>('a' + i % 26)) << "\"}\n";
  lines.close();
  const auto packed = [&](const std::string& run) {
    Words flags = tiny_run(folder, run, 4) + Words{"--model.heads", "4"};
    flags[1] = folder / "examples.jsonl";
    return flags;
  };
  ASSERT_EQ(train(1, packed("plain")).code, 0);
  for (const char* kind : {"ulysses", "ring"}) {
    Said said = train(2, packed(kind) + Words{"--context.size", "2", "--context.kind", kind});
    ASSERT_EQ(said.code, 0) << said.err;
    expect_near(losses(folder, kind), losses(folder, "plain"), 1e-5);
  }
}

TEST(Train, StepsInBackwardChangeNoLoss) {
  Folder folder;
  const Words unclipped = {"--train.clip",        "0",   "--train.micro_batch", "2",
                           "--offload.optimizer", "true"};
  ASSERT_EQ(train(2, tiny_run(folder, "after", 6) + unclipped).code, 0);
  Said said =
      train(2, tiny_run(folder, "in", 6) + unclipped + Words{"--offload.step_in_backward", "true"});
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_EQ(losses(folder, "in"), losses(folder, "after"));
}

TEST(Train, TheSameSeedGivesTheSameBits) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "a", 6)).code, 0);
  ASSERT_EQ(train(2, tiny_run(folder, "b", 6)).code, 0);
  ASSERT_EQ(train(2, tiny_run(folder, "c", 6) + Words{"--seed", "2"}).code, 0);
  EXPECT_EQ(losses(folder, "a"), losses(folder, "b"));
  EXPECT_NE(losses(folder, "a"), losses(folder, "c"));
}

TEST(Train, GraphsAreForGpus) {
  Folder folder;
  ASSERT_EQ(train(1, tiny_run(folder, "off", 4) + Words{"--train.graph", "off"}).code, 0);
  ASSERT_EQ(train(1, tiny_run(folder, "auto", 4) + Words{"--train.graph", "auto"}).code, 0);
  EXPECT_EQ(losses(folder, "off"), losses(folder, "auto"));
  Said said = train(1, tiny_run(folder, "on", 4) + Words{"--train.graph", "on"});
  EXPECT_EQ(said.code, 1);
  EXPECT_TRUE(has(said.err, "computes on the CPU")) << said.err;
}

// --- a run is a directory ---

TEST(Train, ARunIsADirectory) {
  Folder folder;
  Said said = train(2, tiny_run(folder, "run", 4) +
                           Words{"--checkpoint.every", "2", "--checkpoint.when_busy", "wait",
                                 "--checkpoint.keep_last", "0", "--train.eval_every", "2"});
  ASSERT_EQ(said.code, 0) << said.err;
  for (const char* name : {"config.toml", "metrics.jsonl", "tensorboard", "checkpoints/step-2",
                           "checkpoints/step-4/.metadata", "checkpoints/latest"})
    EXPECT_TRUE(fs::exists(folder / (std::string("run/") + name))) << name;
  EXPECT_EQ(fs::read_symlink(folder / "run/checkpoints/latest").filename(), "step-4");
  auto lines = metrics(folder, "run");
  ASSERT_EQ(lines.size(), 4u);
  for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "memory_mb"})
    EXPECT_TRUE(lines[0].contains(key)) << key;
  EXPECT_EQ(lines[3]["step"], 4);
  EXPECT_EQ(lines[3]["tokens"], 4 * 12 * 32);
  EXPECT_FALSE(lines[0].contains("eval_loss"));
  EXPECT_TRUE(lines[1].contains("eval_loss"));
  EXPECT_TRUE(lines[3].contains("eval_perplexity"));
  EXPECT_TRUE(has(said.out, "evaluation after step 2"));
  EXPECT_TRUE(has(said.out, "The model writes:"));
  EXPECT_TRUE(has(said.out, "Next:"));
}

TEST(Train, ADirectoryThatHoldsARunIsNotOverwritten) {
  Folder folder;
  ASSERT_EQ(train(1, tiny_run(folder, "run", 2)).code, 0);
  Said said = train(1, tiny_run(folder, "run", 2));
  EXPECT_EQ(said.code, 1);
  EXPECT_TRUE(has(said.err, "already holds a run"));
  EXPECT_TRUE(has(said.err, "HINT: add --resume"));
  EXPECT_EQ(metrics(folder, "run").size(), 2u);
}

TEST(Train, OnlySoManyCheckpointsAreKept) {
  Folder folder;
  Said said = train(
      1, tiny_run(folder, "run", 5) + Words{"--checkpoint.every", "1", "--checkpoint.when_busy",
                                            "wait", "--checkpoint.keep_last", "2"});
  ASSERT_EQ(said.code, 0) << said.err;
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(folder / "run/checkpoints"))
    left.push_back(entry.path().filename());
  std::sort(left.begin(), left.end());
  EXPECT_EQ(left, (std::vector<std::string>{"latest", "step-4", "step-5"}));
}

// --- stopping and going on ---

TEST(Train, ResumingGivesTheBitsOfTheRunThatNeverStopped) {
  Folder folder;
  Words dropout = {"--model.type", "gpt2", "--model.dropout",
                   "0.1"};  // so random state matters, too
  for (int ranks : {1, 2}) {
    std::string whole = "whole-" + std::to_string(ranks), parts = "parts-" + std::to_string(ranks);
    auto gpt2 = [&](const std::string& run, int steps) {
      Words all = tiny_run(folder, run, steps) + dropout;
      auto at = std::find(all.begin(), all.end(), "--model.kv_heads");
      all.erase(at, at + 2);
      return all + Words{"--optim.schedule", "constant"};
    };
    ASSERT_EQ(train(ranks, gpt2(whole, 12)).code, 0);
    ASSERT_EQ(train(ranks, gpt2(parts, 7)).code, 0);
    Said said = train(ranks, {"--dir", folder / parts, "--resume", "--steps", "12"});
    ASSERT_EQ(said.code, 0) << said.err;
    EXPECT_TRUE(has(said.out, "resumed    after step 7"));
    EXPECT_EQ(losses(folder, parts), losses(folder, whole)) << ranks << " ranks";
  }
}

TEST(Train, ARunMayBeResumedOnAnotherNumberOfRanks) {
  Folder folder;
  ASSERT_EQ(train(1, tiny_run(folder, "whole", 12)).code, 0);
  Words often = {"--checkpoint.every",     "3", "--checkpoint.when_busy", "wait",
                 "--checkpoint.keep_last", "0"};
  ASSERT_EQ(train(4, tiny_run(folder, "parts", 12) + often).code, 0);
  // Go back to step 3, as after a crash.
  for (const char* later : {"step-6", "step-9", "step-12"})
    fs::remove_all(folder / ("parts/checkpoints/" + std::string(later)));
  for (int ranks : {2, 3}) {
    fs::remove(folder / "parts/checkpoints/latest");
    Said said = train(ranks, {"--dir", folder / "parts", "--resume"});
    ASSERT_EQ(said.code, 0) << said.err;
    expect_near(losses(folder, "parts"), losses(folder, "whole"), 1e-5);
    for (const char* later : {"step-6", "step-9", "step-12"})
      if (ranks == 2) fs::remove_all(folder / ("parts/checkpoints/" + std::string(later)));
  }
}

TEST(Train, OnFourThenTwoThenThreeThenOneRankIsTheRunThatNeverStopped) {
  Folder folder;
  ASSERT_EQ(train(1, tiny_run(folder, "whole", 20)).code, 0);
  Words often = {"--checkpoint.every",     "5", "--checkpoint.when_busy", "wait",
                 "--checkpoint.keep_last", "0"};
  ASSERT_EQ(train(4, tiny_run(folder, "parts", 20) + often).code, 0);
  fs::path checkpoints = folder / "parts/checkpoints";
  for (auto [ranks, from] : {std::pair(2, 5), std::pair(3, 10), std::pair(1, 15)}) {
    // Back to where the previous ranks were lost.
    for (int step : {5, 10, 15, 20})
      if (step > from) fs::remove_all(checkpoints / ("step-" + std::to_string(step)));
    fs::remove(checkpoints / "latest");
    Said said = train(ranks, {"--dir", folder / "parts", "--resume"});
    ASSERT_EQ(said.code, 0) << said.err;
    EXPECT_TRUE(has(said.out, "resumed    after step " + std::to_string(from))) << said.out;
  }
  ASSERT_EQ(losses(folder, "parts").size(), 20u);
  expect_near(losses(folder, "parts"), losses(folder, "whole"), 1e-5);
}

class Stopped : public testing::TestWithParam<int> {};

TEST_P(Stopped, BySignalItSavesAndGoesOnWithTheSameBits) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "whole", 40)).code, 0);
  Words command = Words{paths::program("fsdp"), "train", "--ranks", "2"} +
                  tiny_run(folder, "parts", 40) + Words{"--log.every", "1"};
  int code;
  {
    Launched program(command, {"OMP_NUM_THREADS=1", "FSDP_BACKEND=shm", "RANK", "WORLD_SIZE"});
    ASSERT_TRUE(launch::eventually([&] {
      return fs::exists(folder / "parts/metrics.jsonl") &&
             folder.read("parts/metrics.jsonl").find("\"step\":3") != std::string::npos;
    })) << program.err();
    program.signal(GetParam());
    code = program.wait();
    EXPECT_EQ(code, 0) << program.out() << program.err();
    if (metrics(folder, "parts").size() < 40) {
      EXPECT_TRUE(has(program.out(), "stopping after step"));
      EXPECT_TRUE(has(program.out(), "--resume"));
    }
  }
  if (metrics(folder, "parts").size() < 40) {
    Said said = train(2, {"--dir", folder / "parts", "--resume"});
    ASSERT_EQ(said.code, 0) << said.err;
  }
  EXPECT_EQ(losses(folder, "parts"), losses(folder, "whole"));
}

INSTANTIATE_TEST_SUITE_P(Signals, Stopped, testing::Values(SIGINT, SIGTERM),
                         [](const auto& info) { return std::string(sigabbrev_np(info.param)); });

TEST(Train, AKilledRunGoesOnFromItsLastCheckpoint) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "whole", 60)).code, 0);
  {
    Launched program(Words{paths::program("fsdp"), "train", "--ranks", "2"} +
                         tiny_run(folder, "parts", 60) +
                         Words{"--checkpoint.every", "4", "--checkpoint.when_busy", "wait"},
                     {"OMP_NUM_THREADS=1", "FSDP_BACKEND=shm", "RANK", "WORLD_SIZE"});
    ASSERT_TRUE(
        launch::eventually([&] { return fs::exists(folder / "parts/checkpoints/step-8"); }));
    program.signal(SIGKILL);
    program.wait();
  }
  Said said = train(2, {"--dir", folder / "parts", "--resume"});
  ASSERT_TRUE(said.code == 0 || has(said.err, "is complete")) << said.err;
  EXPECT_EQ(losses(folder, "parts"), losses(folder, "whole"));
}

// --- what goes wrong ---

TEST(Train, ALossThatIsNotFiniteIsSkippedOrStops) {
  Folder folder;
  Words explosive = {"--optim.lr",   "1e30", "--train.clip",     "0", "--optim.warmup_steps",  "0",
                     "--optim.type", "sgd",  "--optim.momentum", "0", "--train.sample_tokens", "0"};
  Said stopped =
      train(2, tiny_run(folder, "stop", 8) + explosive + Words{"--train.on_nan", "stop"});
  EXPECT_NE(stopped.code, 0);
  EXPECT_TRUE(has(stopped.err, "train.on_nan is stop"));
  Said skipped =
      train(2, tiny_run(folder, "skip", 8) + explosive + Words{"--train.max_skips", "3"});
  EXPECT_NE(skipped.code, 0);
  EXPECT_TRUE(has(skipped.out, "not finite, the step is skipped"));
  EXPECT_TRUE(has(skipped.err, "4 times in a row"));
  auto lines = metrics(folder, "skip");
  EXPECT_FALSE(lines.empty());
  Said early =
      train(2, tiny_run(folder, "early", 8) + explosive +
                   Words{"--offload.optimizer", "true", "--offload.step_in_backward", "true"});
  EXPECT_NE(early.code, 0);
  EXPECT_TRUE(has(early.err, "updated with it in backward")) << early.err;
}

TEST(Train, WhatDoesNotFitIsRefusedBeforeAnythingStarts) {
  Folder folder;
  struct Wrong {
    int ranks;
    Words flags;
    const char* reason;
  } all[] = {{2, {"--train.batch", "13"}, "batch"},
             {1, {"--optim.lrr", "1"}, "optim.lr"},
             {1, {"--train.micro_batch", "5"}, "micro_batch"},
             {1, {"--model.vocab", "100"}, "the tokenizer has 257 tokens"},
             {1, {"--data.train", folder / "nowhere"}, "nowhere"}};
  for (const Wrong& wrong : all) {
    Said said = train(wrong.ranks, tiny_run(folder, "run", 2) + wrong.flags);
    EXPECT_NE(said.code, 0) << wrong.reason;
    EXPECT_TRUE(has(said.err, wrong.reason));
    EXPECT_TRUE(has(said.err, "HINT:"));
    EXPECT_FALSE(fs::exists(folder / "run/metrics.jsonl"));
    fs::remove_all(folder / "run");
  }
}

TEST(Train, NothingToResumeIsAnError) {
  Folder folder;
  Said said = train(1, {"--dir", folder / "none", "--resume"});
  EXPECT_NE(said.code, 0);
  EXPECT_TRUE(has(said.err, "HINT:"));
}

// --- models, precisions, data ---

TEST(Train, EveryModelLearns) {
  Folder folder;
  struct Model {
    const char* name;
    Words flags;
  } models[] = {{"gpt2", {"--model.type", "gpt2", "--model.kv_heads", "0"}},
                {"qwen2", {"--model.type", "qwen2", "--model.tied", "true"}},
                {"llama3", {"--model.rope_scaling", "llama3", "--model.rope_base", "500000"}},
                {"documents", {"--data.document_mask", "true"}}};
  for (const Model& model : models) {
    Said said = train(2, tiny_run(folder, model.name, 15) + model.flags);
    ASSERT_EQ(said.code, 0) << model.name << "\n" << said.err;
    std::vector<double> all = losses(folder, model.name);
    EXPECT_LT(all.back(), all.front()) << model.name;
  }
}

TEST(Train, AnMlpLearnsToMoveVectors) {
  Folder folder;
  Said said = train(2, {"mlp-small", "--model.width", "16", "--model.layers", "1", "--train.batch",
                        "24", "--optim.lr", "0.03", "--steps", "30", "--dir", folder / "mlp"});
  ASSERT_EQ(said.code, 0) << said.err;
  std::vector<double> all = losses(folder, "mlp");
  EXPECT_LT(all.back(), all.front() / 2);
}

TEST(Train, LowPrecisionFollowsTheFullOne) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "fp32", 10)).code, 0);
  for (const char* precision : {"bf16", "fp16"}) {
    Said said = train(2, tiny_run(folder, precision, 10) + Words{"--shard.precision", precision});
    ASSERT_EQ(said.code, 0) << said.err;
    expect_near(losses(folder, precision), losses(folder, "fp32"), 0.15);
  }
}

TEST(Train, Fp8FollowsTheFullPrecision) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "fp32", 10)).code, 0);
  for (const char* recipe : {"tensorwise", "rowwise"}) {
    Said said = train(
        2, tiny_run(folder, recipe, 10) + Words{"--shard.precision", "fp8", "--fp8.recipe", recipe,
                                                "--fp8.least", "16", "--fp8.skip", "k_proj"});
    ASSERT_EQ(said.code, 0) << said.err;
    expect_near(losses(folder, recipe), losses(folder, "fp32"), 0.15);
    const std::string text = said.out + said.err;
    const std::string said_first = "fp8 (" + std::string(recipe) + "): 12 linears; in bf16";
    EXPECT_NE(text.find(said_first), std::string::npos) << text;
    EXPECT_NE(text.find("self_attn.k_proj and 1 more (excluded by name)"), std::string::npos);
  }
}

TEST(Train, OneByteOnTheWireFollowsTheFullOne) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "plain", 10)).code, 0);
  for (const std::string wire : {"fp8", "int8"}) {
    Said said = train(
        2, tiny_run(folder, wire, 10) + Words{"--shard.gather", wire, "--shard.reduce", wire});
    ASSERT_EQ(said.code, 0) << said.err;
    expect_near(losses(folder, wire), losses(folder, "plain"), 0.15);
    EXPECT_NE(losses(folder, wire), losses(folder, "plain"));
  }
}

// --- launchers ---

TEST(Train, RunsUnderEveryLauncher) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "own", 4)).code, 0);
  const char* python = std::getenv("FSDP_TEST_PYTHON");
  ASSERT_NE(python, nullptr) << "FSDP_TEST_PYTHON names a python with torch.";
  std::vector<std::pair<std::string, Words>> launchers = {
      {"fsdp-run",
       {paths::program("fsdp"), "run", "-n", "2", "--", paths::program("fsdp"), "train"}},
      {"torchrun",
       {python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--no-python", paths::program("fsdp"), "train"}}};
#ifdef FSDP_TEST_MPI
  launchers.push_back({"mpirun",
                       {"mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2",
                        paths::program("fsdp"), "train"}});
#endif
  for (const auto& [name, launcher] : launchers) {
    Said said = run(launcher + tiny_run(folder, name, 4), {"OMP_NUM_THREADS=1"});
    ASSERT_EQ(said.code, 0) << name << said.err;
    EXPECT_EQ(losses(folder, name), losses(folder, "own")) << name;
  }
}

// --- text from a checkpoint ---

TEST(Generate, WritesFromARunAndTheSameSeedWritesTheSame) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "run", 30)).code, 0);
  auto write = [&](Words flags) {
    return fsdp(Words{"generate", folder / "run", "--prompt", "shard ", "--tokens", "40"} + flags);
  };
  Said first = write({}), again = write({}), other = write({"--seed", "7"});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_TRUE(first.out.starts_with("shard "));
  EXPECT_EQ(first.out, again.out);
  EXPECT_NE(first.out, other.out);
  EXPECT_EQ(write({"--temperature", "0"}).out, write({"--top-k", "1", "--seed", "9"}).out);
  EXPECT_EQ(write({"--temperature", "0"}).out, write({"--top-p", "1e-9", "--seed", "9"}).out);
  Said one = fsdp({"generate", folder / "run/checkpoints/step-30", "--quiet", "--tokens", "5"});
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(one.err, "");
}

TEST(Generate, SaysWhatIsWrong) {
  Folder folder;
  Said said = fsdp({"generate", folder / "none"});
  EXPECT_EQ(said.code, 1);
  EXPECT_TRUE(has(said.err, "HINT: pass a run's directory"));
  Said range = fsdp({"generate", folder.path(), "--top-p", "2"});
  EXPECT_EQ(range.code, 2);
  EXPECT_TRUE(has(range.err, "top-p"));
}

// A process with a memory limit, and a batch that is too large for it.
TEST(Train, ThatMemoryRunsOutIsExplained) {
  launch::Folder folder;
  Words limited = {"sh", "-c", "ulimit -d 4000000 && exec \"$@\"", "sh"};
  Said said = run(
      limited +
      Words{
          paths::program("fsdp"), "train",  "--ranks",        "1",  "--dir",         folder / "run",
          "--data.train",         "random", "--data.seq",     "32", "--model.vocab", "64",
          "--model.dim",          "64",     "--model.layers", "2",  "--model.heads", "2",
          "--train.batch",        "200000", "--steps",        "2"});
  EXPECT_EQ(said.code, 71);
  for (const char* part :
       {"out of memory", "held:", "planned:", "1. ", "micro-batches of 100000", "HINT:"})
    EXPECT_TRUE(has(said.err, part)) << part << " in\n" << said.err;
  EXPECT_TRUE(has(said.err, "The same as a page: ")) << said.err;
  const std::string page = folder.read("run/out-of-memory-rank0.html");
  for (const char* part : {"What would help", "micro-batches of 100000", "activations"})
    EXPECT_TRUE(has(page, part)) << part;
  EXPECT_TRUE(has(folder.read("run/events.jsonl"), "\"event\":\"out_of_memory\""));
}

}  // namespace
}  // namespace fsdp::train
