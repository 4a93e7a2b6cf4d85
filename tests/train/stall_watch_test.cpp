// A step that takes far too long is reported once, with stacks; steps of usual length aren't.
#include "train/stall_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "base/rank_status.h"

namespace fsdp::train {
namespace {

TEST(StepHistory, GivesTheFactorOfNineOfTenRecentSteps) {
  StepHistory history(10, 0);
  for (int i = 0; i < 9; ++i) history.add(0.1);
  EXPECT_FALSE(history.limit_s()) << "nine steps are too few";
  history.add(5);  // one of ten may be slow
  ASSERT_TRUE(history.limit_s());
  EXPECT_DOUBLE_EQ(*history.limit_s(), 1);
  for (int i = 0; i < 64; ++i) history.add(2);
  EXPECT_DOUBLE_EQ(*history.limit_s(), 20);
}

TEST(StepHistory, HasALeastLimitAndAFactorOfZeroHasNone) {
  StepHistory history(10, 60), off(0, 60);
  for (int i = 0; i < 20; ++i) {
    history.add(0.1);
    off.add(0.1);
  }
  EXPECT_DOUBLE_EQ(*history.limit_s(), 60);
  EXPECT_FALSE(off.limit_s());
}

StepHistory quick() {
  StepHistory history(2, 0.05);
  for (int i = 0; i < 20; ++i) history.add(0.001);
  return history;
}

TEST(StallWatch, ReportsAStepThatHangsAndTheNextOne) {
  std::promise<Stall> reports[2];
  std::atomic<int> count{0};
  StallReport report;
  StallWatch watch(quick(), [&](const Stall& stall) {
    const int number = count++;
    if (number == 0) report = describe(stall);
    if (number < 2) reports[number].set_value(stall);
  });
  rank_status::set_step(7);
  rank_status::set_phase("a phase");
  watch.begin_step(7);
  const auto limit = std::chrono::minutes(1);
  auto first = reports[0].get_future();  // this thread hangs until it is reported
  ASSERT_EQ(first.wait_for(limit), std::future_status::ready);
  const Stall stall = first.get();
  EXPECT_EQ(stall.step, 7);
  EXPECT_GE(stall.seconds, 0.05);
  EXPECT_DOUBLE_EQ(stall.usual_s, 0.001);
  EXPECT_NE(report.brief.find("step 7 has taken"), std::string::npos) << report.brief;
  EXPECT_NE(report.brief.find("a phase"), std::string::npos) << report.brief;
  EXPECT_NE(report.full.find("the main thread"), std::string::npos) << report.full;
  const size_t main_thread = report.full.find("the main thread\n  #0 ");
  ASSERT_NE(main_thread, std::string::npos) << report.full;
  EXPECT_NE(report.full.find("(libc.so", main_thread), std::string::npos) << report.full;
  watch.begin_step(8);
  auto second = reports[1].get_future();
  ASSERT_EQ(second.wait_for(limit), std::future_status::ready);
  EXPECT_EQ(second.get().step, 8);
  EXPECT_EQ(count, 2) << "a step is reported once";
}

TEST(StallWatch, ARankInACollectiveIsNotTheOneThatStalls) {
  std::promise<void> reported;
  std::atomic<bool> waiting{true};
  StallWatch watch(quick(), [&](const Stall&) {
    EXPECT_FALSE(waiting) << "reported while it waited for others";
    reported.set_value();
  });
  auto end = reported.get_future();
  {
    rank_status::Collective collective("all_gather", 3, "unit a");
    watch.begin_step(1);
    EXPECT_EQ(end.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
    waiting = false;
  }
  EXPECT_EQ(end.wait_for(std::chrono::minutes(1)), std::future_status::ready);
}

TEST(StallWatch, WhatIsNotAStepIsNotWatched) {
  std::atomic<int> count{0};
  {
    StallWatch watch(quick(), [&](const Stall&) { ++count; });
    watch.begin_step(1);
    watch.pause();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // more than the limit
  }
  EXPECT_EQ(count, 0);
}

}  // namespace
}  // namespace fsdp::train
