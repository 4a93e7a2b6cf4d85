#include "base/rank_status.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <memory>
#include <string>
#include <thread>

namespace fsdp::rank_status {
namespace {

TEST(RankStatus, ReadsWhatWasReported) {
  set_step(12);
  set_phase("backward");
  set_unit("layers.7", "aten::addmm");
  set_grace(45);
  {
    Collective running("all_gather", 50331648, "unit \"layers.7\" (prefetch)");
    Status status = current();
    EXPECT_EQ(status.pid, getpid());
    EXPECT_EQ(status.step, 12);
    EXPECT_EQ(status.phase, "backward");
    EXPECT_EQ(status.unit, "unit \"layers.7\" (aten::addmm)");
    EXPECT_EQ(status.collective,
              "all_gather of 50,331,648 elements for unit \"layers.7\" (prefetch)");
    EXPECT_TRUE(status.in_collective);
    EXPECT_EQ(status.grace_s, 45);
  }
  EXPECT_FALSE(current().in_collective);
  set_phase("save");
  EXPECT_EQ(current().unit, "");  // of the phase before
  EXPECT_FALSE(launcher_is_stopping());
  EXPECT_FALSE(told_to_let_go());
}

TEST(RankStatus, AnEarlierCollectiveThatEndsLaterHidesNothing) {
  auto first = std::make_unique<Collective>("all_gather", 1, "first");
  auto second = std::make_unique<Collective>("barrier", 0, "");
  first.reset();
  EXPECT_TRUE(current().in_collective);
  EXPECT_EQ(current().collective, "barrier");
  second.reset();
  EXPECT_FALSE(current().in_collective);
}

TEST(RankStatus, LongTextsAreCut) {
  set_phase(std::string(10'000, 'x'));
  std::string phase = current().phase;
  EXPECT_GT(phase.size(), 20u);
  EXPECT_EQ(phase, std::string(phase.size(), 'x'));
  set_phase("");
}

TEST(RankStatus, ConcurrentReportsAreReadWhole) {
  std::atomic<bool> done{false};
  auto report = [&](char letter) {
    std::string text(40, letter);
    while (!done) set_phase(text);
  };
  std::thread first(report, 'a'), second(report, 'b');
  for (int i = 0; i < 20'000; ++i) {
    std::string phase = current().phase;
    if (phase.empty()) continue;
    ASSERT_EQ(phase, std::string(phase.size(), phase.front()));
  }
  done = true;
  first.join();
  second.join();
}

TEST(RankStatus, GraceIsThirtySecondsOrThreeSlowSteps) {
  EXPECT_EQ(default_grace(0), 30);
  EXPECT_EQ(default_grace(0.2), 30);
  EXPECT_EQ(default_grace(10), 30);
  EXPECT_EQ(default_grace(10.5), 31.5);
  EXPECT_EQ(default_grace(600), 1800);
}

TEST(RankStatus, ASharedPageStartsEmpty) {
  SharedPage page;
  ASSERT_GE(page.fd(), 0);
  EXPECT_EQ(page.read().pid, 0);
  EXPECT_EQ(page.read().grace_s, 0);
  page.close_fd();
  EXPECT_EQ(page.fd(), -1);
  EXPECT_EQ(page.read().collective, "");  // still mapped
}

// The rank of the next test: a process of its own, because a process looks for its page only once.
TEST(RankStatusRank, JoinsTheStartThatIsAnnounced) {
  if (!getenv(kVariable)) GTEST_SKIP() << "started by another test";
  set_recovers(true);
  for (int i = 0; i < 60'000 && !told_to_let_go(); ++i) usleep(1000);
  EXPECT_TRUE(told_to_let_go());
  set_waits_for(3);
  EXPECT_FALSE(told_to_let_go());
  Start start;
  for (int i = 0; i < 60'000 && (start = announced()).attempt == 0; ++i) usleep(1000);
  set_joined(start.attempt);
  EXPECT_EQ(start.variables, "MASTER_PORT=1234\nRANK=0\n");
}

TEST(RankStatus, ARankReadsTheStartThatTheLauncherAnnounces) {
  SharedPage page;
  ASSERT_GE(page.fd(), 0);
  pid_t child = fork();
  if (child == 0) {
    fcntl(page.fd(), F_SETFD, 0);
    setenv(kVariable, std::to_string(page.fd()).c_str(), 1);
    execl("/proc/self/exe", "core_tests", "--gtest_filter=RankStatusRank.*", nullptr);
    _exit(2);
  }
  page.tell_to_let_go(3);
  for (int i = 0; i < 60'000 && page.read().waits_for == 0; ++i) usleep(1000);
  EXPECT_TRUE(page.read().recovers);
  EXPECT_EQ(page.read().waits_for, 3);
  EXPECT_EQ(page.read().joined, 0);
  page.announce({.attempt = 3, .variables = "MASTER_PORT=1234\nRANK=0\n"});
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(page.read().joined, 3);
}

TEST(RankStatus, TheKernelKnowsWhatAProcessDoes) {
  pid_t child = fork();
  if (child == 0) {
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
  EXPECT_EQ(thread_state(child), "stopped");
  EXPECT_TRUE(cpu_seconds(child).has_value());
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(thread_state(child), "gone");
  EXPECT_FALSE(cpu_seconds(child).has_value());
  EXPECT_EQ(thread_state(getpid()), "running");
}

TEST(RankStatus, WhereaboutsNameStepPhaseUnitAndCollective) {
  Status status;
  status.pid = getpid();
  status.step = 12;
  status.phase = "backward";
  status.unit = "unit \"layers.7\" (backward)";
  status.collective = "all_gather of 512 elements";
  status.age_s = 52;
  EXPECT_EQ(whereabouts(status, getpid(), {}),
            "step 12, backward, unit \"layers.7\" (backward), last collective all_gather of 512 "
            "elements; last report 52 s ago; main thread running");
  EXPECT_EQ(whereabouts({}, getpid(), {}), "no status reported; main thread running");
}

}  // namespace
}  // namespace fsdp::rank_status
