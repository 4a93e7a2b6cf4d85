// Ranks of real runs are killed, and the runs go on. Their losses are those of undisturbed runs, bit
// for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>
#include <set>
#include <sstream>

#include "free_port.h"
#include "train/runs.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;
using launch::eventually;
using launch::Folder;
using launch::has;
using launch::Launched;

const Words kHere = {"FSDP_SECRET=0123456789abcdef0123456789abcdef", "OMP_NUM_THREADS=1", "FSDP_BACKEND=shm", "FSDP_TIMEOUT=60", "RANK",
                     "WORLD_SIZE"};
constexpr std::chrono::seconds kLong{240};  // of an end, on a machine with much else to do
constexpr int kSteps = 100;  // enough to be killed in

// With dropout, so that random states count.
Words with_dropout(const Folder& folder, const std::string& run, int steps) {
  Words all =
      tiny_run(folder, run, steps) + Words{"--model.type", "gpt2", "--model.dropout", "0.1"};
  const auto at = std::find(all.begin(), all.end(), "--model.kv_heads");
  all.erase(at, at + 2);
  return all;
}

class Recovery : public testing::Test {
 protected:
  std::unique_ptr<Launched> launch(int ranks, const Words& launcher, const Words& flags) {
    const Words all = run_with_pids(
        folder_,
        Words{"-n", std::to_string(ranks), "--max-restarts", "3", "--no-prefix"} + launcher);
    return std::make_unique<Launched>(all + with_dropout(folder_, "hurt", kSteps) + flags, kHere);
  }
  void start(int ranks, const Words& flags) { run_ = launch(ranks, {}, flags); }
  pid_t pid(int rank) { return folder_.read_pid("rank-" + std::to_string(rank)); }

  bool reaches(int64_t step) {
    return eventually([&] {
      const std::string file = folder_ / "hurt/metrics.jsonl";
      if (!fs::exists(file)) return false;
      const std::string text = folder_.read("hurt/metrics.jsonl");
      const size_t line = text.rfind("{\"step\":");
      return line != std::string::npos && std::atoll(text.c_str() + line + 8) >= step;
    });
  }
  // Waits until rank 0's host has published `count` checkpoints in memory of steps after this one,
  // and returns the step of the first. With two, every host has the first whole, copies included: a
  // save begins only then. -1: there were fewer until the deadline.
  int64_t saved(size_t count, int64_t after = 0) {
    std::set<int64_t> seen;
    const bool enough = eventually([&] {
      std::string folder = folder_.read("memory-0");
      folder.resize(folder.find_last_not_of('\n') + 1);
      std::error_code problem;
      for (const auto& entry : fs::directory_iterator(folder + "/checkpoints", problem)) {
        const std::string name = entry.path().filename();
        const int64_t step = std::atoll(name.c_str() + name.find('-') + 1);
        if (name == "step-" + std::to_string(step) && step > after) seen.insert(step);
      }
      return seen.size() >= count;
    });
    return enough ? *seen.begin() : -1;
  }
  bool said(const std::string& text, int times = 1) {
    return eventually([&] {
      const std::string all = run_->err() + run_->out();
      int found = 0;
      for (size_t at = all.find(text); at != std::string::npos; at = all.find(text, at + 1)) ++found;
      return found >= times;
    });
  }

  // The steps after which the run went on.
  std::vector<int64_t> resumed() const {
    std::istringstream lines(run_->out());
    std::vector<int64_t> all;
    for (std::string line; std::getline(lines, line);)
      if (const std::string text = "resumed    after step "; line.find(text) != std::string::npos)
        all.push_back(std::atoll(line.c_str() + line.find(text) + text.size()));
    return all;
  }

  void expect_undisturbed_losses(int ranks) {
    ASSERT_EQ(run_->wait(kLong), 0) << run_->err();
    ASSERT_EQ(train(ranks, with_dropout(folder_, "whole", kSteps)).code, 0);
    EXPECT_EQ(losses(folder_, "hurt"), losses(folder_, "whole"));
  }

  Folder folder_;
  std::unique_ptr<Launched> run_;
};

TEST_F(Recovery, ARankThatIsKilledIsReplacedAndTheOthersGoOnFromMemory) {
  start(4, {"--recovery.every", "2"});
  const int64_t kept = saved(2);
  ASSERT_GT(kept, 0) << run_->err();
  const pid_t first = pid(0), second = pid(1), third = pid(2), fourth = pid(3);
  kill(third, SIGKILL);
  ASSERT_TRUE(said("all ranks have joined again")) << run_->err();
  ASSERT_TRUE(said("resumed    after step")) << run_->err();
  EXPECT_EQ(pid(1), second);
  EXPECT_NE(pid(2), third);
  // Now rank 0, which holds the store and writes the files of the run.
  const int64_t kept_later = saved(2, resumed().front());
  ASSERT_GT(kept_later, 0) << run_->err();
  kill(first, SIGKILL);
  ASSERT_TRUE(said("all ranks have joined again", 2)) << run_->err();
  expect_undisturbed_losses(4);
  EXPECT_EQ(pid(3), fourth);
  const auto steps = resumed();
  ASSERT_EQ(steps.size(), 2u) << run_->out();
  EXPECT_GE(steps[0], kept);
  EXPECT_GE(steps[1], kept_later);
  EXPECT_TRUE(has(run_->err(), "restart 2 of 3: rank 0 is replaced, the others stay."));
  EXPECT_FALSE(fs::exists(folder_ / ("hurt/checkpoints/step-" + std::to_string(steps[0]))));
}

TEST_F(Recovery, IfAllRanksDieTheRunGoesOnFromMemory) {
  start(2, {"--recovery.every", "2"});
  const int64_t kept = saved(2);
  ASSERT_GT(kept, 0) << run_->err();
  const pid_t ranks[] = {pid(0), pid(1)};
  for (pid_t rank : ranks) kill(rank, SIGKILL);
  expect_undisturbed_losses(2);
  ASSERT_EQ(resumed().size(), 1u);
  EXPECT_GE(resumed()[0], kept);
}

// Two launchers of two ranks each, as on two hosts: each has a folder in memory of its own.
class TwoHosts : public Recovery {
 protected:
  std::unique_ptr<Launched> node(const std::string& number, const std::string& nnodes,
                                 const Words& flags) {
    return launch(
        2,
        {"--nnodes", nnodes, "--node-rank", number, "--rendezvous-timeout", timeout_, "--master",
         "127.0.0.1:" + std::to_string(port_), "--control-port", std::to_string(control_)},
        Words{"--recovery.every", "2"} + flags);
  }
  // The launcher's guard ends its ranks and removes its folder.
  void lose(Launched& host) {
    kill(host.pid(), SIGKILL);
    EXPECT_TRUE(eventually([&] { return !launch::is_alive(host.pid()); }));
  }

  std::string timeout_ = "120";
  const int port_ = free_port(), control_ = free_port();
};

TEST_F(TwoHosts, ALostOneIsReplacedByASpareThatGetsItsPartFromTheCopies) {
  run_ = node("0", "2", {});
  const auto other = node("1", "2", {});
  EXPECT_TRUE(said("recovery   if ranks or a host die, the run goes on from a checkpoint"));
  const int64_t kept = saved(2);
  ASSERT_GT(kept, 0) << run_->err() << other->err();
  const auto spare = node("spare", "2", {});
  lose(*other);
  expect_undisturbed_losses(4);
  EXPECT_EQ(spare->wait(kLong), 0) << spare->err();
  ASSERT_EQ(resumed().size(), 1u) << run_->out();
  EXPECT_GE(resumed()[0], kept);
  EXPECT_FALSE(fs::exists(folder_ / ("hurt/checkpoints/step-" + std::to_string(resumed()[0]))));
}

TEST_F(TwoHosts, WithoutASpareFewerRanksGoOnFromTheCopies) {
  timeout_ = "5";
  run_ = node("0", "1:2", {"--model.dropout", "0"});
  const auto other = node("1", "1:2", {"--model.dropout", "0"});
  const int64_t kept = saved(2);
  ASSERT_GT(kept, 0) << run_->err() << other->err();
  lose(*other);
  ASSERT_EQ(run_->wait(kLong), 0) << run_->err();
  ASSERT_EQ(resumed().size(), 1u) << run_->out();
  EXPECT_GE(resumed()[0], kept);
  Words whole = with_dropout(folder_, "whole", kSteps) + Words{"--model.dropout", "0"};
  ASSERT_EQ(train(2, whole).code, 0);
  const auto hurt = losses(folder_, "hurt"), undisturbed = losses(folder_, "whole");
  ASSERT_EQ(hurt.size(), undisturbed.size());
  for (size_t step = 0; step < hurt.size(); ++step)
    EXPECT_NEAR(hurt[step], undisturbed[step], 1e-3) << step;
}

// A rank finds its own file in its host's memory; that of rank 0 has to be brought to node 1.
TEST_F(TwoHosts, ARankThatIsKilledIsReplacedAndThoseOfBothHostsGoOnFromMemory) {
  run_ = node("0", "2", {});
  const auto other = node("1", "2", {});
  const int64_t kept = saved(2);
  ASSERT_GT(kept, 0) << run_->err() << other->err();
  const pid_t ranks[] = {pid(0), pid(1), pid(2), pid(3)};
  kill(ranks[2], SIGKILL);
  ASSERT_TRUE(said("all ranks have joined again")) << run_->err() << other->err();
  ASSERT_TRUE(said("resumed    after step")) << run_->err();
  EXPECT_NE(pid(2), ranks[2]);
  // Now rank 0, which holds the store.
  const int64_t kept_later = saved(2, resumed().front());
  ASSERT_GT(kept_later, 0) << run_->err();
  EXPECT_EQ(pid(0), ranks[0]);
  kill(ranks[0], SIGKILL);
  ASSERT_TRUE(said("all ranks have joined again", 2)) << run_->err() << other->err();
  expect_undisturbed_losses(4);
  EXPECT_EQ(other->wait(kLong), 0) << other->err();
  EXPECT_EQ(pid(1), ranks[1]);
  EXPECT_EQ(pid(3), ranks[3]);
  const auto steps = resumed();
  ASSERT_EQ(steps.size(), 2u) << run_->out();
  EXPECT_GE(steps[0], kept);
  EXPECT_GE(steps[1], kept_later);
  EXPECT_TRUE(has(other->err(), "restart 2 of 3: rank 0 is replaced, the others stay."));
  EXPECT_FALSE(fs::exists(folder_ / ("hurt/checkpoints/step-" + std::to_string(steps[0]))));
}

TEST_F(Recovery, WithoutMemoryTheRunGoesOnFromTheDisk) {
  start(2, {"--recovery.memory", "off", "--checkpoint.every", "5"});
  ASSERT_TRUE(reaches(13)) << run_->err();
  kill(pid(1), SIGKILL);
  expect_undisturbed_losses(2);
  ASSERT_EQ(resumed().size(), 1u);
  EXPECT_EQ(resumed()[0] % 5, 0);
}

TEST_F(Recovery, WithoutAnyCheckpointTheRunBeginsAgainInItsDirectory) {
  start(2, {"--recovery.memory", "off"});
  ASSERT_TRUE(reaches(5)) << run_->err();
  kill(pid(0), SIGKILL);
  expect_undisturbed_losses(2);
  EXPECT_TRUE(resumed().empty());
}

TEST_F(Recovery, ByDefaultItIsOnWhereTheLauncherRestartsRanks) {
  start(2, {});
  EXPECT_TRUE(said("recovery   if ranks die, the run goes on from a checkpoint in memory"));
  ASSERT_GT(saved(1), 0) << run_->err();
  kill(pid(1), SIGKILL);
  expect_undisturbed_losses(2);
  EXPECT_EQ(resumed().size(), 1u);
}

TEST(RecoveryMemory, OnNeedsALauncherThatRestarts) {
  Folder folder;
  Said said = train(1, tiny_run(folder, "run", 3) + Words{"--recovery.memory", "on"});
  EXPECT_NE(said.code, 0);
  EXPECT_TRUE(has(said.err, "recovery.memory is on, but "));
  EXPECT_TRUE(has(said.err, "--max-restarts"));
}

TEST(RecoveryMemory, TrainHasRestartsOfItsOwn) {
  Folder folder;
  Said said = train(
      1, tiny_run(folder, "run", 3) + Words{"--max-restarts", "1", "--recovery.memory", "on"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(has(said.out, "recovery   if ranks die"));
}

}  // namespace
}  // namespace fsdp::train
