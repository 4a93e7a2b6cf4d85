// How fsdp run ends ranks after a signal: the grace, the report about ranks that hang, the second
// signal. Real processes and real signals.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <memory>

#include "launch/launched.h"
#include "launch/ports.h"
#include "paths.h"

namespace fsdp::launch {
namespace {

using Words = std::vector<std::string>;

std::string pid_text(pid_t pid) {
  return "(pid " + std::to_string(pid) + "): ";
}

// A second signal soon after the first counts as the same one, so it is repeated.
bool signal_until(Launched& run, int signal, const std::string& text) {
  return eventually([&] {
    run.signal(signal);
    return run.err().find(text) != std::string::npos;
  });
}

class Hung : public testing::TestWithParam<int> {};

TEST_P(Hung, RanksAreKilledAfterTheGraceAndTheReportSaysWhereTheyWere) {
  Folder folder;
  Launched run(
      fsdp_run({"-n", "2", "--grace", "0.5", paths::program("stuck_rank"), folder.path()}));
  pid_t first = folder.read_pid("rank-0"), second = folder.read_pid("rank-1");
  run.signal(GetParam());
  EXPECT_EQ(run.wait(), 128 + GetParam());
  std::string name = "SIG" + std::string(sigabbrev_np(GetParam()));
  EXPECT_TRUE(has(run.err(), "interrupted by " + name + "; ending 2 ranks."));
  EXPECT_TRUE(
      has(run.err(), "2 ranks didn't end within 0.5 s of " + name + ": killing (SIGKILL)."));
  EXPECT_TRUE(
      has(run.err(), "rank 0 " + pid_text(first) +
                         "step 12, backward, unit \"layers.7\" (backward), in all_gather of "
                         "1,024 elements for unit \"layers.7\" (backward); last report "));
  EXPECT_TRUE(
      has(run.err(), "rank 1 " + pid_text(second) +
                         "step 12, backward, unit \"layers.7\" (backward), last collective "
                         "reduce_scatter of 512 elements for unit \"layers.8\" (gradients); "
                         "last report "));
  EXPECT_TRUE(has(run.err(), "; main thread running, "));
  EXPECT_TRUE(has(run.err(), "; main thread sleeping"));
  EXPECT_TRUE(has(run.err(), " of CPU time since the signal."));
  EXPECT_TRUE(has(run.err(), "HINT: if they only needed more time, raise --grace"));
  EXPECT_TRUE(is_gone(first));
  EXPECT_TRUE(is_gone(second));
}

INSTANTIATE_TEST_SUITE_P(Signals, Hung, testing::Values(SIGINT, SIGTERM),
                         [](const auto& info) { return std::string(sigabbrev_np(info.param)); });

TEST(Stop, WithoutAFlagRanksGetTheGraceTheyAskFor) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", paths::program("stuck_rank"), folder.path(), "0.7"}));
  pid_t first = folder.read_pid("rank-0"), second = folder.read_pid("rank-1");
  run.signal(SIGTERM);
  EXPECT_EQ(run.wait(), 128 + SIGTERM);
  EXPECT_TRUE(has(run.err(), "2 ranks didn't end within 0.7 s of SIGTERM"));
  EXPECT_TRUE(is_gone(first));
  EXPECT_TRUE(is_gone(second));
}

TEST(Stop, AStatusReachesTheLauncherThroughAShell) {
  Folder folder;
  Launched run(
      fsdp_run({"-n", "1", "--grace", "0.5", "sh", "-c", "trap '' TERM; \"$0\" \"$1\"; true",
                paths::program("stuck_rank"), folder.path()}));
  pid_t rank = folder.read_pid("rank-0");
  run.signal(SIGTERM);
  EXPECT_EQ(run.wait(), 128 + SIGTERM);
  EXPECT_TRUE(has(run.err(), "rank 0 " + pid_text(rank) + "step 12, backward"));
  EXPECT_TRUE(is_gone(rank));
}

TEST(Stop, ARankWithoutAStatusIsShownWithItsLastLine) {
  Folder folder;
  Launched run(fsdp_run({"-n", "1", "--grace", "0.5", "sh", "-c",
                         "trap '' TERM; echo loading; echo $$ > $0/pid; "
                         "while :; do sleep 0.05; done",
                         folder.path()}));
  pid_t rank = folder.read_pid("pid");
  ASSERT_TRUE(eventually([&] { return run.out() == "loading\n"; }));
  run.signal(SIGTERM);
  EXPECT_EQ(run.wait(), 128 + SIGTERM);
  EXPECT_TRUE(has(run.err(), "1 rank didn't end within 0.5 s of SIGTERM: killing (SIGKILL)."));
  EXPECT_TRUE(has(run.err(), "rank 0 " + pid_text(rank) + "no status reported; main thread "));
  EXPECT_TRUE(has(run.err(), "    Its last line: loading\n"));
}

TEST(Stop, ASecondSignalKillsAtOnceAndSaysWhereRanksWere) {
  Folder folder;
  Launched run(
      fsdp_run({"-n", "2", "--grace", "100000", paths::program("stuck_rank"), folder.path()}));
  pid_t first = folder.read_pid("rank-0"), second = folder.read_pid("rank-1");
  run.signal(SIGTERM);
  EXPECT_TRUE(eventually([&] { return has(run.err(), "interrupted by SIGTERM").operator bool(); }));
  EXPECT_TRUE(is_alive(first));
  EXPECT_TRUE(signal_until(run, SIGTERM, "killing 2 ranks (SIGKILL)."));
  EXPECT_EQ(run.wait(), 128 + SIGTERM);
  EXPECT_TRUE(has(run.err(), "rank 0 " + pid_text(first) + "step 12, backward"));
  EXPECT_TRUE(has(run.err(), "rank 1 " + pid_text(second) + "step 12, backward"));
  EXPECT_TRUE(is_gone(first));
  EXPECT_TRUE(is_gone(second));
}

// --- SIGUSR1, which batch systems send ahead of a time limit ---

constexpr const char* kSaves =
    "trap 'echo saved by $RANK; exit 0' USR1; echo $$ > $0/rank-$RANK; "
    "while :; do sleep 0.05; done";

TEST(Stop, Sigusr1IsPassedOnAndRanksEndByIt) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "sh", "-c", kSaves, folder.path()}));
  folder.read_pid("rank-0"), folder.read_pid("rank-1");
  run.signal(SIGUSR1);
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_EQ(run.out_lines(), (Words{"[0] saved by 0", "[1] saved by 1"}));
  EXPECT_TRUE(has(run.err(), "interrupted by SIGUSR1; ending 2 ranks."));
}

TEST(Stop, Sigusr1MayBeRepeatedAndSigtermMayFollow) {
  Folder folder;
  Launched run(fsdp_run({"-n", "1", "--grace", "100000", "sh", "-c",
                         "trap ': > $0/usr1' USR1; trap 'echo ended; exit 0' TERM; "
                         "echo $$ > $0/rank-0; while :; do sleep 0.05; done",
                         folder.path()}));
  const pid_t rank = folder.read_pid("rank-0");
  run.signal(SIGUSR1);
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(folder / "usr1"); }));
  std::filesystem::remove(folder / "usr1");
  kill(rank, SIGUSR1);  // by the batch system, to every process
  EXPECT_TRUE(eventually([&] {
    run.signal(SIGUSR1);
    return std::filesystem::exists(folder / "usr1");
  }));
  EXPECT_TRUE(is_alive(rank));
  run.signal(SIGTERM);
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_TRUE(has(run.out(), "ended"));
}

TEST(Stop, ARankThatSigusr1KillsGivesItsCode) {
  Folder folder;
  Launched run(
      fsdp_run({"-n", "1", "sh", "-c", "echo $$ > $0/rank-0; exec sleep 1000", folder.path()}));
  folder.read_pid("rank-0");
  run.signal(SIGUSR1);
  EXPECT_EQ(run.wait(), 128 + SIGUSR1);
}

// 75 says: saved, and not done. Only of programs with this library, which report a status.
TEST(Stop, RanksThatSavedAndAreNotDoneGiveTheirCode) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", paths::program("stuck_rank"), folder.path(), "100", "75"}));
  folder.read_pid("rank-0"), folder.read_pid("rank-1");
  run.signal(SIGUSR1);
  EXPECT_EQ(run.wait(), 75) << run.err();
  EXPECT_TRUE(has(run.err(), "interrupted by SIGUSR1; ending 2 ranks."));
  EXPECT_EQ(run.err().find("error"), std::string::npos) << run.err();
}

TEST(Stop, ARankThatOnlyLostAnotherOneIsNotTheCause) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "sh", "-c",
                         "if test $RANK = 0; then echo $$ > $0/rank-0; exit 69; fi; "
                         "while ! test -s $0/rank-0; do sleep 0.01; done; "
                         "until grep -q 'State:.Z' /proc/$(cat $0/rank-0)/status; do sleep 0.01; "
                         "done; exit 4",
                         folder.path()}));
  EXPECT_EQ(run.wait(), 4) << run.err();
  EXPECT_TRUE(has(run.err(), "error: rank 1 (pid "));
  Launched alone(fsdp_run({"-n", "2", "sh", "-c", "test $RANK = 0 && exit 69; exec sleep 1000"}));
  EXPECT_EQ(alone.wait(), 69) << alone.err();
}

// One run of two nodes, one hung rank on each.
struct TwoNodes {
  TwoNodes(Words flags_of_0, Words flags_of_1) {
    int master = free_port(), control = free_port();
    for (int node : {0, 1}) {
      Words words = {"--nnodes",       "2",
                     "--node-rank",    std::to_string(node),
                     "--master",       "127.0.0.1:" + std::to_string(master),
                     "--control-port", std::to_string(control)};
      const Words& flags = node == 0 ? flags_of_0 : flags_of_1;
      words.insert(words.end(), flags.begin(), flags.end());
      words.insert(words.end(), {paths::program("stuck_rank"), folder.path()});
      launchers[node] = std::make_unique<Launched>(fsdp_run(words));
    }
    for (int node : {0, 1}) ranks[node] = folder.read_pid("rank-" + std::to_string(node));
  }
  Folder folder;
  std::unique_ptr<Launched> launchers[2];
  pid_t ranks[2];
};

class SignalledNode : public testing::TestWithParam<int> {};

TEST_P(SignalledNode, EveryNodeKillsItsRanksAfterTheGraceOfNodeZero) {
  TwoNodes nodes({"--grace", "0.5"}, {"--grace", "100000"});
  nodes.launchers[GetParam()]->signal(SIGTERM);
  for (int node : {0, 1}) {
    EXPECT_EQ(nodes.launchers[node]->wait(), 128 + SIGTERM);
    std::string err = nodes.launchers[node]->err();
    EXPECT_TRUE(has(err, "1 rank didn't end within 0.5 s of SIGTERM"));
    EXPECT_TRUE(has(err, "rank " + std::to_string(node) + " " + pid_text(nodes.ranks[node]) +
                             "step 12, backward"));
    EXPECT_TRUE(is_gone(nodes.ranks[node]));
  }
}

TEST_P(SignalledNode, ASecondSignalKillsOnEveryNode) {
  TwoNodes nodes({"--grace", "100000"}, {});
  Launched& signalled = *nodes.launchers[GetParam()];
  signalled.signal(SIGINT);
  for (auto& launcher : nodes.launchers) {
    EXPECT_TRUE(
        eventually([&] { return has(launcher->err(), "interrupted on node").operator bool(); }));
  }
  EXPECT_TRUE(is_alive(nodes.ranks[0]));
  EXPECT_TRUE(is_alive(nodes.ranks[1]));
  EXPECT_TRUE(signal_until(signalled, SIGINT, "killing 1 rank (SIGKILL)."));
  for (int node : {0, 1}) {
    EXPECT_EQ(nodes.launchers[node]->wait(), 128 + SIGINT);
    EXPECT_TRUE(is_gone(nodes.ranks[node]));
  }
}

INSTANTIATE_TEST_SUITE_P(Node, SignalledNode, testing::Values(0, 1));

}  // namespace
}  // namespace fsdp::launch
