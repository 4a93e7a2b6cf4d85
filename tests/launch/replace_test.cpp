// Ranks that die while the others stay: real processes that do what a trainer does, and real kills.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp::launch {
namespace {

using Words = std::vector<std::string>;

struct Joined {
  int attempt = -1, port = 0;
  pid_t pid = 0;
};

class Replaced : public testing::Test {
 protected:
  std::unique_ptr<Launched> start(int ranks, Words flags, Words what = {}) {
    Words words = {"-n", std::to_string(ranks)};
    words.insert(words.end(), flags.begin(), flags.end());
    words.insert(words.end(), {paths::program("recovering_rank"), folder_.path()});
    words.insert(words.end(), what.begin(), what.end());
    auto run = std::make_unique<Launched>(fsdp_run(words));
    for (int rank = 0; rank < ranks; ++rank) pids_.push_back(folder_.read_pid(name("rank", rank)));
    return run;
  }
  static std::string name(const char* what, int rank) {
    return std::string(what) + "-" + std::to_string(rank);
  }
  void make(const std::string& file) { std::ofstream(folder_ / file) << "\n"; }

  // The starts that a rank has joined, once there are `count`.
  std::vector<Joined> joined(int rank, size_t count) {
    std::vector<Joined> all;
    eventually([&] {
      all.clear();
      std::istringstream lines(folder_.read(name("joined", rank)));
      for (Joined one; lines >> one.attempt >> one.port >> one.pid;) all.push_back(one);
      return all.size() >= count;
    });
    return all;
  }

  Folder folder_;
  std::vector<pid_t> pids_;
};

TEST_F(Replaced, ARankThatIsKilledIsReplacedAndTheOthersStay) {
  auto run = start(3, {"--max-restarts", "2"});
  kill(pids_[1], SIGKILL);
  make("dead");
  std::set<int> ports;
  for (int rank : {0, 1, 2}) {
    const auto starts = joined(rank, 2);
    ASSERT_EQ(starts.size(), 2u) << "rank " << rank << "\n" << run->err();
    EXPECT_EQ(starts[1].attempt, 1);
    EXPECT_EQ(starts[1].pid == starts[0].pid, rank != 1);
    ports.insert(starts[1].port);
  }
  EXPECT_EQ(ports.size(), 1u) << "all ranks meet at one port";
  ASSERT_TRUE(eventually([&] { return run->err().find("joined again") != std::string::npos; }));
  make("done");
  EXPECT_EQ(run->wait(), 0) << run->err();
  EXPECT_TRUE(has(run->err(), "rank 1 (pid " + std::to_string(pids_[1]) +
                                  ") was killed by signal 9 (SIGKILL)."));
  EXPECT_TRUE(has(run->err(), "restart 1 of 2: rank 1 is replaced, the others stay."));
}

TEST_F(Replaced, SeveralRanksAtOnceAreOneRestart) {
  auto run = start(4, {"--max-restarts", "1"});
  kill(pids_[0], SIGKILL);
  kill(pids_[2], SIGKILL);
  make("dead");
  for (int rank : {0, 1, 2, 3}) ASSERT_EQ(joined(rank, 2).size(), 2u) << run->err();
  EXPECT_EQ(joined(1, 2)[1].pid, pids_[1]);
  EXPECT_EQ(joined(3, 2)[1].pid, pids_[3]);
  make("done");
  EXPECT_EQ(run->wait(), 0) << run->err();
}

TEST_F(Replaced, ARankThatDoesNotLetGoInTimeIsKilledAndReplacedToo) {
  auto run = start(2, {"--max-restarts", "1"}, {"stays"});
  kill(pids_[1], SIGKILL);
  for (int rank : {0, 1}) {
    const auto starts = joined(rank, 2);
    ASSERT_EQ(starts.size(), 2u) << run->err();
    EXPECT_EQ(starts[1].attempt, 1);
    EXPECT_NE(starts[1].pid, pids_[rank]);
  }
  make("done");
  EXPECT_EQ(run->wait(), 0) << run->err();
}

TEST_F(Replaced, WithoutRestartsLeftAllRanksEnd) {
  auto run = start(2, {});
  kill(pids_[1], SIGKILL);
  EXPECT_EQ(run->wait(), 128 + SIGKILL) << run->err();
  EXPECT_TRUE(is_gone(pids_[0]));
}

TEST_F(Replaced, RanksOfOtherProgramsAllRestart) {
  auto run = start(2, {"--max-restarts", "1"}, {"plain"});
  kill(pids_[1], SIGKILL);
  for (int rank : {0, 1}) {
    ASSERT_EQ(joined(rank, 2).size(), 2u) << run->err();
    EXPECT_NE(joined(rank, 2)[1].pid, pids_[rank]);
  }
  make("done");
  EXPECT_EQ(run->wait(), 0) << run->err();
  EXPECT_TRUE(has(run->err(), "restart 1 of 1.\n"));
}

TEST_F(Replaced, AReplacementThatFailsRestartsAllRanksOrEndsTheRun) {
  auto run = start(2, {"--max-restarts", "1"}, {"fails"});
  kill(pids_[1], SIGKILL);
  make("dead");
  EXPECT_EQ(run->wait(), 3) << run->err();
  EXPECT_TRUE(has(run->err(), "giving up after restart 1."));
  EXPECT_TRUE(is_gone(pids_[0]));
}

// --- the folder in memory ---

std::string folder_of(Launched& run) {
  std::string path;
  eventually([&] {
    path = run.out();
    return path.find('\n') != std::string::npos;
  });
  return path.substr(0, path.find('\n'));
}

TEST(MemoryFolder, IsThereWhileRanksMayRestartAndGoneAfterwards) {
  Folder folder;
  Launched run(fsdp_run({"-n", "1", "--no-prefix", "--max-restarts", "1", "sh", "-c",
                         "echo $FSDP_MEMORY_DIR; touch $FSDP_MEMORY_DIR/file; "
                         "while ! test -e $0/done; do sleep 0.01; done",
                         folder.path()}));
  const std::string path = folder_of(run);
  ASSERT_TRUE(path.starts_with("/dev/shm/")) << path;
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(path + "/file"); }));
  EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms::owner_all);
  std::ofstream(folder / "done") << "\n";
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(MemoryFolder, OfAKilledLauncherIsRemoved) {
  Launched run(fsdp_run({"-n", "1", "--no-prefix", "--max-restarts", "1", "sh", "-c",
                         "echo $FSDP_MEMORY_DIR; sleep 1000"}));
  const std::string path = folder_of(run);
  ASSERT_TRUE(std::filesystem::exists(path));
  run.signal(SIGKILL);
  EXPECT_TRUE(eventually([&] { return !std::filesystem::exists(path); }));
}

TEST(MemoryFolder, IsNotMadeIfRanksDoNotRestart) {
  Launched run(fsdp_run({"-n", "1", "sh", "-c", "echo \"folder: $FSDP_MEMORY_DIR.\""}),
               {"FSDP_MEMORY_DIR=/left/over"});
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.out(), "folder: .\n");
}

}  // namespace
}  // namespace fsdp::launch
