// Real runs that are told to stop: one that saves in time, and one whose rank hangs in a step.
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

const Words kEnvironment = {"OMP_NUM_THREADS=1", "FSDP_BACKEND=shm", "FSDP_TIMEOUT=600", "RANK",
                            "WORLD_SIZE"};

bool reached_step_3(const Folder& folder, const std::string& run) {
  return launch::eventually([&] {
    return fs::exists(folder / (run + "/metrics.jsonl")) &&
           folder.read(run + "/metrics.jsonl").find("\"step\":3") != std::string::npos;
  });
}

class StoppedRun : public testing::TestWithParam<int> {};

TEST_P(StoppedRun, SavesWithinTheGraceAndExitsWithZero) {
  Folder folder;
  Launched run(Words{paths::program("fsdp"), "train", "--ranks", std::to_string(GetParam()),
                     "--grace", "600", "--log.every", "1"} +
                   tiny_run(folder, "run", 100'000),
               kEnvironment);
  ASSERT_TRUE(reached_step_3(folder, "run")) << run.err();
  EXPECT_FALSE(fs::exists(folder / "run/checkpoints/latest"));
  run.signal(SIGTERM);
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_TRUE(fs::exists(folder / "run/checkpoints/latest"));
  EXPECT_EQ(run.err().find("didn't end within"), std::string::npos) << run.err();
}

INSTANTIATE_TEST_SUITE_P(Ranks, StoppedRun, testing::Values(1, 2));

// Rank 1 is stopped, so rank 0 waits for it in a collective. Only rank 0 gets the signal: its own
// watchdog must end it.
TEST(HungRun, ARankThatHangsInAStepEndsItselfAndSaysWhereItWas) {
  Folder folder;
  const Words command = run_with_pids(folder, {"-n", "2", "--no-prefix"}) + Words{"--grace", "1"} +
                        tiny_run(folder, "run", 100'000);
  Launched run(command, kEnvironment);
  pid_t first = folder.read_pid("rank-0"), second = folder.read_pid("rank-1");
  ASSERT_TRUE(reached_step_3(folder, "run")) << run.err();
  ASSERT_EQ(kill(second, SIGSTOP), 0);
  ASSERT_EQ(kill(first, SIGTERM), 0);
  EXPECT_EQ(run.wait(), 128 + SIGTERM);
  EXPECT_TRUE(has(run.err(), "rank 0 (pid " + std::to_string(first) +
                                 ") didn't end within 1.0 s of SIGTERM: exiting with code 143."));
  EXPECT_TRUE(has(run.err(), "  step "));
  EXPECT_TRUE(has(run.err(), ", in "));
  EXPECT_TRUE(has(run.err(), "; main thread "));
  EXPECT_TRUE(launch::is_gone(first));
  EXPECT_TRUE(launch::is_gone(second));
}

TEST(Grace, ABadValueIsAnErrorThatNamesTheKey) {
  for (const char* value : {"-1", "soon", "nan"}) {
    Said said = train(1, {"--train.grace", value, "--steps", "1"});
    EXPECT_NE(said.code, 0);
    EXPECT_TRUE(has(said.err, "train.grace"));
    EXPECT_TRUE(has(said.err, "HINT"));
  }
}

}  // namespace
}  // namespace fsdp::train
