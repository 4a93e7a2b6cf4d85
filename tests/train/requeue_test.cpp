// Runs that a batch system stops and starts again: --resume=auto, SIGUSR1, exit codes.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "paths.h"
#include "train/runs.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;
using launch::Folder;
using launch::has;
using launch::Launched;

Words job(const Folder& folder, int ranks, int steps) {
  return Words{paths::program("fsdp"), "train", "--ranks", std::to_string(ranks)} +
         tiny_run(folder, "run", steps) + Words{"--resume=auto", "--log.every", "1"};
}

const Words kJobEnvironment = {"OMP_NUM_THREADS=1", "FSDP_BACKEND=shm", "RANK", "WORLD_SIZE",
                               "FSDP_TIMEOUT"};

bool begins_step_3(const Folder& folder) {
  return launch::eventually(
      [&] { return folder.read("run/metrics.jsonl").find("\"step\":3") != std::string::npos; });
}

std::string latest(const Folder& folder) {
  return fs::read_symlink(folder / "run/checkpoints/latest").filename();
}

class Requeued : public testing::TestWithParam<int> {};

TEST_P(Requeued, TheSameCommandBeginsGoesOnAndEnds) {
  Folder folder;
  {
    Launched first(job(folder, GetParam(), 100'000), kJobEnvironment);
    ASSERT_TRUE(begins_step_3(folder)) << first.err();
    first.signal(SIGUSR1);
    EXPECT_EQ(first.wait(), 75) << first.err();
    EXPECT_TRUE(has(first.out(), "stopping after step"));
    EXPECT_EQ(first.err().find("error"), std::string::npos) << first.err();
  }
  const std::string before = latest(folder);
  const int done = std::stoi(before.substr(before.find('-') + 1));
  const auto second = run(job(folder, GetParam(), done + 2), kJobEnvironment);
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_TRUE(has(second.out, "resumed    after step " + std::to_string(done)));
  EXPECT_EQ(latest(folder), "step-" + std::to_string(done + 2));
  EXPECT_EQ(metrics(folder, "run").size(), static_cast<size_t>(done + 2));
  const auto third = run(job(folder, GetParam(), done + 2), kJobEnvironment);
  EXPECT_EQ(third.code, 0) << third.err;
  EXPECT_TRUE(has(third.out, "is complete: it has done"));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Requeued, testing::Values(1, 2));

TEST(ResumeAuto, ARunThatLeftNoCheckpointIsBegunAnew) {
  Folder folder;
  {
    Launched killed(job(folder, 1, 100'000), kJobEnvironment);
    ASSERT_TRUE(begins_step_3(folder)) << killed.err();
    killed.signal(SIGKILL);
    killed.wait();
  }
  const auto again = run(job(folder, 1, 4), kJobEnvironment);
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(again.out.find("resumed"), std::string::npos) << again.out;
  EXPECT_EQ(metrics(folder, "run").size(), 4u);
}

TEST(ResumeAuto, NeedsADirectoryThatStaysTheSame) {
  const Said said = fsdp({"train", "--resume=auto", "--steps", "2"});
  EXPECT_EQ(said.code, 2);
  EXPECT_TRUE(has(said.err, "--resume=auto needs the run's directory."));
  EXPECT_TRUE(has(said.err, "HINT: fsdp train --dir runs/NAME --resume=auto."));
}

TEST(ResumeAuto, WithoutItAStoppedRunEndsWithZero) {
  Folder folder;
  Launched stopped(Words{paths::program("fsdp"), "train", "--ranks", "1", "--log.every", "1"} +
                       tiny_run(folder, "run", 100'000),
                   kJobEnvironment);
  ASSERT_TRUE(begins_step_3(folder)) << stopped.err();
  stopped.signal(SIGUSR1);
  EXPECT_EQ(stopped.wait(), 0) << stopped.err();
}

TEST(ExitCodes, AMistakeInTheConfigIsOneOfTheUser) {
  Folder folder;
  EXPECT_EQ(fsdp({"train", "--optim.lr", "soon"}).code, 2);
  EXPECT_EQ(fsdp({"train", folder / "none.toml"}).code, 2);
  EXPECT_EQ(fsdp({"train", "--no-such-flag"}).code, 2);
  EXPECT_EQ(train(2, tiny_run(folder, "run", 2) + Words{"--batch", "13"}).code, 2);
  EXPECT_EQ(
      fsdp({"run", "-n", "2", "--no-prefix", paths::program("fsdp"), "train", "--batch", "13"})
          .code,
      2);
}

// Rank 1 is stopped. Rank 0 says so once, without stacks of c10d, and the launcher gives its code.
TEST(ExitCodes, ALostRankIsOneToStartAgainFor) {
  Folder folder;
  const Words command = run_with_pids(folder, {"-n", "2", "--no-prefix", "--grace", "1"}) +
                        tiny_run(folder, "run", 100'000);
  Launched lost(command,
                {"OMP_NUM_THREADS=1", "FSDP_BACKEND=shm", "FSDP_TIMEOUT=5", "RANK", "WORLD_SIZE"});
  const pid_t second = folder.read_pid("rank-1");
  ASSERT_TRUE(begins_step_3(folder)) << lost.err();
  ASSERT_EQ(kill(second, SIGSTOP), 0);
  EXPECT_EQ(lost.wait(), 69) << lost.err();
  const std::string err = lost.err();
  EXPECT_TRUE(has(err, "no answer in 5 s from rank 1"));
  const std::string printed = err.substr(0, err.find("Its last lines"));
  const size_t once = printed.find("rank 0: error");  // rank 1 wakes up to end, and quotes it
  EXPECT_EQ(printed.find("rank 0: error", once + 1), std::string::npos) << err;
  EXPECT_EQ(err.find("frame #"), std::string::npos) << err;
  EXPECT_TRUE(launch::is_gone(second));
}

TEST(Leftovers, ARunLeavesNoFileForPerf) {
  Folder folder;
  Launched one(Words{paths::program("fsdp"), "train", "--ranks", "1"} + tiny_run(folder, "run", 2),
               {"OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE", "ONEDNN_JIT_PROFILE"});
  EXPECT_EQ(one.wait(), 0) << one.err();
  EXPECT_FALSE(fs::exists("/tmp/perf-" + std::to_string(one.pid()) + ".map"));
}

}  // namespace
}  // namespace fsdp::train
