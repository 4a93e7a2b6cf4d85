// The grace of a run that received a signal, and the end of one that takes longer. Each process
// that ends is a real one (a gtest death test).
#include "train/stop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

#include "base/rank_status.h"

namespace fsdp::train {
namespace {

using rank_status::current;

TEST(StopSignals, TheGraceFollowsTheExpectedDuration) {
  StopSignals signals;
  EXPECT_EQ(current().grace_s, 30);
  signals.begin_part("evaluation", 100);
  EXPECT_EQ(current().grace_s, 300);
  EXPECT_EQ(current().phase, "evaluation");
  signals.begin_part("step");
  EXPECT_EQ(current().grace_s, 30);
  signals.begin_part("step");
  EXPECT_GT(signals.slowest("step"), 0);
  EXPECT_EQ(signals.slowest("save"), 0);
}

TEST(StopSignals, ASetGraceIsKept) {
  StopSignals signals(5);
  signals.begin_part("save", 200);
  EXPECT_EQ(current().grace_s, 5);
}

TEST(StopSignals, APartThatBeginsAfterTheSignalGetsItsOwnTime) {
  StopSignals signals;
  EXPECT_EQ(StopSignals::received(), 0);
  raise(SIGTERM);
  EXPECT_EQ(StopSignals::received(), SIGTERM);
  signals.begin_part("save", 200);
  EXPECT_GT(current().grace_s, 600);
}

// A batch system sends it ahead of the end, perhaps to every process and more than once.
TEST(StopSignals, Sigusr1IsNoFirstOfTwoSignals) {
  StopSignals signals;
  raise(SIGUSR1);
  EXPECT_EQ(StopSignals::received(), SIGUSR1);
  usleep(400'000);  // longer than two of the same count as one
  raise(SIGUSR1);
  raise(SIGTERM);  // the first that counts; a second one would end this process
  EXPECT_EQ(StopSignals::received(), SIGTERM);
}

TEST(StopSignals, EndsWithTheOldHandlers) {
  struct sigaction before {
  }, after{};
  sigaction(SIGTERM, nullptr, &before);
  { StopSignals signals; }
  sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

class Ended : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  static std::string name() { return "SIG" + std::string(sigabbrev_np(GetParam())); }
};

[[noreturn]] void hang_after(int signal) {
  StopSignals signals(0.5, 3);
  rank_status::set_step(12);
  signals.begin_part("step");
  rank_status::set_phase("backward");
  rank_status::set_unit("layers.7", "backward");
  raise(signal);
  volatile bool forever = true;
  while (forever) {
  }
  std::abort();
}

TEST_P(Ended, AHungRankReportsWhereItWasAndExits) {
  EXPECT_EXIT(hang_after(GetParam()), ::testing::ExitedWithCode(128 + GetParam()),
              "rank 3 .pid [0-9]+. didn't end within 0.5 s of " + name() +
                  ": exiting with code .*step 12, backward, unit \"layers.7\" .backward.; .*main "
                  "thread running.*HINT: .*--grace");
}

[[noreturn]] void hang_after_a_failure() {
  StopSignals signals(0, 3);
  rank_status::set_step(12);
  signals.failed(69, std::chrono::milliseconds(200));
  pause();  // as a destructor might that waits for another rank
  std::abort();
}

TEST(StopSignals, AFailedRunThatDoesNotGetThroughItsDestructorsEnds) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(hang_after_a_failure(), ::testing::ExitedWithCode(69),
              "rank 3 .pid [0-9]+. didn't end within 0.2 s of its failure: exiting with code 69");
}

[[noreturn]] void hang_until_the_second(int signal) {
  StopSignals signals(1e6, 3);
  while (true) {  // one that follows the first too soon counts as the same
    raise(signal);
    usleep(10'000);
  }
}

TEST_P(Ended, ASecondSignalEndsTheProcessAtOnce) {
  EXPECT_EXIT(hang_until_the_second(GetParam()), ::testing::ExitedWithCode(128 + GetParam()), "");
}

INSTANTIATE_TEST_SUITE_P(Signals, Ended, ::testing::Values(SIGINT, SIGTERM),
                         [](const auto& info) { return std::string(sigabbrev_np(info.param)); });

}  // namespace
}  // namespace fsdp::train
