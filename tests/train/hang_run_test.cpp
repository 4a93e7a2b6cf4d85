// Runs that hang or have a slow rank: what fsdp hang says about a run under way, and the waiting
// times of all ranks in the metrics.
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <sstream>
#include <thread>

#include "train/runs.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;
using launch::Folder;
using launch::has;
using launch::Launched;

// Two ranks of a long run, each of which leaves its process's number in FOLDER/rank-N.
struct TwoRanks {
  explicit TwoRanks(const Folder& folder, Words more = {})
      : run(command(folder, more),
            {"OMP_NUM_THREADS=1", "FSDP_BACKEND=shm", "FSDP_TIMEOUT=600", "RANK", "WORLD_SIZE"}),
        first(folder.read_pid("rank-0")),
        second(folder.read_pid("rank-1")) {}

  static Words command(const Folder& folder, const Words& more) {
    return run_with_pids(folder, {"-n", "2", "--grace", "1"}) + more +
           tiny_run(folder, "run", 1'000'000);
  }

  Launched run;
  pid_t first, second;
};

std::string metrics_of(const Folder& folder) {
  return fs::exists(folder / "run/metrics.jsonl") ? folder.read("run/metrics.jsonl") : "";
}

TEST(HangingRun, IsAskedWhileItRunsAndNamesTheStoppedRank) {
  Folder folder;
  TwoRanks ranks(folder);
  ASSERT_TRUE(launch::eventually([&] {
    return metrics_of(folder).find("\"step\":3") != std::string::npos;
  })) << ranks.run.err();
  ASSERT_EQ(kill(ranks.second, SIGSTOP), 0);
  Said said;
  // Rank 0 is in a collective as soon as it needs rank 1.
  ASSERT_TRUE(launch::eventually([&] {
    said = fsdp({"hang", folder / "run", "--json"});
    return said.out.find("\"kind\":\"missing\"") != std::string::npos;
  })) << said.out
      << said.err;
  said = fsdp({"hang", folder / "run"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(has(said.out, "run/flight: 1 of 2 ranks"));
  EXPECT_TRUE(has(said.out, "waiting  rank 0"));
  EXPECT_TRUE(
      has(said.out, "rank 1 (pid " + std::to_string(ranks.second) + ") doesn't answer: stopped"));
  EXPECT_TRUE(launch::is_alive(ranks.first)) << "asking ended it";
  kill(ranks.second, SIGCONT);
  // It goes on.
  const size_t before = metrics_of(folder).size();
  EXPECT_TRUE(launch::eventually([&] { return metrics_of(folder).size() > before; }));
  ranks.run.signal(SIGTERM);
  ranks.run.wait();
}

TEST(HangingRun, TheLauncherAsksBeforeItKills) {
  Folder folder;
  TwoRanks ranks(folder, {"--train.grace", "600"});
  ASSERT_TRUE(launch::eventually([&] {
    return metrics_of(folder).find("\"step\":3") != std::string::npos;
  })) << ranks.run.err();
  ASSERT_EQ(kill(ranks.second, SIGKILL), 0);
  EXPECT_EQ(ranks.run.wait(), 128 + SIGKILL);
  EXPECT_TRUE(has(ranks.run.err(), "HINT: fsdp hang "));
  const Said said = fsdp({"hang", folder / "run"});
  EXPECT_TRUE(has(said.out, "rank 1 has no file"));
  EXPECT_TRUE(has(said.out, "died")) << "rank 0's error";
}

// Rank 1 gets a part of the time only.
TEST(SlowRank, IsTheOneThatWaitsLeast) {
  Folder folder;
  TwoRanks ranks(folder, {"--log.compare_ranks", "5"});
  std::atomic<bool> stop{false};
  std::thread slow([&] {
    while (!stop) {
      kill(ranks.second, SIGSTOP);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      kill(ranks.second, SIGCONT);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  const bool warned = launch::eventually(
      [&] { return ranks.run.out().find("warning: slow-rank: rank 1 on ") != std::string::npos; });
  stop = true;
  slow.join();
  kill(ranks.second, SIGCONT);
  EXPECT_TRUE(warned) << ranks.run.out() << ranks.run.err();
  ranks.run.signal(SIGTERM);
  ranks.run.wait();
  std::istringstream lines(metrics_of(folder));
  nlohmann::json last;
  for (std::string line; std::getline(lines, line);) {
    const auto record = nlohmann::json::parse(line, nullptr, false);
    if (!record.is_object() || !record.contains("rank_wait_ms")) continue;
    EXPECT_EQ(record["step"].get<int>() % 5, 0);
    last = record;
  }
  ASSERT_EQ(last["rank_wait_ms"].size(), 2u);
  ASSERT_EQ(last["rank_step_ms"].size(), 2u);
}

}  // namespace
}  // namespace fsdp::train
