// Ranks that die while those of all nodes stay: two launchers on this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "launch/launched.h"
#include "launch/ports.h"
#include "paths.h"

namespace fsdp::launch {
namespace {

// Node 0 has ranks 0 and 1, node 1 has ranks 2 and 3. What the ranks do: recovering_rank.cpp.
class ReplacedOnNodes : public testing::Test {
 protected:
  void start(int restarts, const std::string& what, const std::string& what_on_node_1) {
    nodes_.push_back(launch(0, restarts, what));
    nodes_.push_back(launch(1, restarts, what_on_node_1));
    for (int rank : {0, 1, 2, 3}) pids_[rank] = folder_.read_pid("rank-" + std::to_string(rank));
  }
  std::unique_ptr<Launched> launch(int node, int restarts, const std::string& what) {
    return ports_.start(2, node,
                        {"-n", "2", "--max-restarts", std::to_string(restarts),
                         paths::program("recovering_rank"), folder_.path(), what});
  }
  void make(const std::string& file) { std::ofstream(folder_ / file) << "\n"; }

  // Waits until all ranks are in that start, which has one port. Only `dead` are other processes
  // than before. Returns the port.
  int expect_start(int attempt, const std::set<int>& dead) {
    std::set<int> ports;
    for (int rank : {0, 1, 2, 3}) {
      int joined = -1, port = 0;
      pid_t pid = 0;
      eventually([&] {
        std::istringstream lines(folder_.read("joined-" + std::to_string(rank)));
        while (lines >> joined >> port >> pid) continue;
        return joined >= attempt;
      });
      EXPECT_EQ(joined, attempt) << "rank " << rank << "\n" << said();
      EXPECT_EQ(pid != pids_[rank], dead.contains(rank)) << "rank " << rank << "\n" << said();
      pids_[rank] = pid;
      ports.insert(port);
    }
    EXPECT_EQ(ports.size(), 1u) << "all ranks meet at one port";
    return *ports.begin();
  }
  bool all_say(const std::string& text) {
    return eventually([&] {
      return std::all_of(nodes_.begin(), nodes_.end(), [&](const auto& node) {
        return node->err().find(text) != std::string::npos;
      });
    });
  }
  void expect_end(int code) {
    for (auto& node : nodes_) EXPECT_EQ(node->wait(), code) << node->err();
  }
  std::string said() const { return nodes_[0]->err() + "\nnode 1:\n" + nodes_[1]->err(); }

  Ports ports_;
  Folder folder_;
  std::vector<std::unique_ptr<Launched>> nodes_;
  std::map<int, pid_t> pids_;
};

const std::set<int> kAll = {0, 1, 2, 3};

class ReplacedOnNode : public ReplacedOnNodes, public testing::WithParamInterface<int> {};

TEST_P(ReplacedOnNode, ARankThatIsKilledIsReplacedAndTheOthersOfBothNodesStay) {
  start(2, "told", "told");
  const int dead = 2 * GetParam();
  const std::string who = "rank " + std::to_string(dead);
  const std::string report = who + " (pid " + std::to_string(pids_[dead]) + ") on node " +
                             std::to_string(GetParam()) + " was killed by signal 9 (SIGKILL).";
  kill(pids_[dead], SIGKILL);
  EXPECT_NE(expect_start(1, {dead}), ports_.master) << "the store before may still listen there";
  EXPECT_TRUE(all_say("all ranks have joined again")) << said();
  EXPECT_TRUE(all_say(report)) << said();
  EXPECT_TRUE(all_say("restart 1 of 2: " + who + " is replaced, the others stay.")) << said();
  kill(pids_[dead], SIGKILL);
  expect_start(2, {dead});
  make("done");
  expect_end(0);
}

TEST_P(ReplacedOnNode, WithoutRestartsLeftAllRanksEnd) {
  start(0, "told", "told");
  kill(pids_[2 * GetParam()], SIGKILL);
  expect_end(128 + SIGKILL);
  for (int rank : kAll) EXPECT_TRUE(is_gone(pids_[rank]));
  EXPECT_FALSE(has(said(), "replaced"));
}

INSTANTIATE_TEST_SUITE_P(Node, ReplacedOnNode, testing::Values(0, 1));

TEST_F(ReplacedOnNodes, RanksOfBothNodesAtOnceAreOneRestart) {
  start(1, "", "");
  for (int rank : {1, 3}) kill(pids_[rank], SIGKILL);
  for (int rank : {1, 3}) EXPECT_TRUE(is_gone(pids_[rank]));
  make("dead");
  expect_start(1, {1, 3});
  make("done");
  expect_end(0);
}

TEST_F(ReplacedOnNodes, ARankThatDoesNotLetGoInTimeIsKilledAndReplacedToo) {
  start(1, "told", "stays");
  kill(pids_[0], SIGKILL);
  expect_start(1, {0, 2, 3});
  make("done");
  expect_end(0);
}

// --- all ranks restart, at the master port ---

TEST_F(ReplacedOnNodes, AReplacementThatFailsRestartsAllRanks) {
  start(2, "fails", "fails");
  kill(pids_[3], SIGKILL);
  make("dead");
  EXPECT_EQ(expect_start(2, kAll), ports_.master);
  make("done");
  expect_end(0);
}

TEST_F(ReplacedOnNodes, RanksThatDoNotRecoverOnAnotherNodeRestartAll) {
  start(2, "told", "plain");
  kill(pids_[0], SIGKILL);
  EXPECT_EQ(expect_start(2, kAll), ports_.master);
  make("done");
  expect_end(0);
}

TEST_F(ReplacedOnNodes, ALauncherThatIsLostMeanwhileIsWaitedForAndAllRanksRestart) {
  start(3, "", "");  // its ranks don't let go yet
  kill(pids_[0], SIGKILL);
  ASSERT_TRUE(all_say("restart 1 of 3: rank 0 is replaced")) << said();
  nodes_[1]->signal(SIGKILL);
  ASSERT_TRUE(is_gone(pids_[3]));
  nodes_[1] = launch(1, 3, "");
  EXPECT_EQ(expect_start(2, kAll), ports_.master);
  make("done");
  expect_end(0);
}

}  // namespace
}  // namespace fsdp::launch
