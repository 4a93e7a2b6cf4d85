#include "fsdp/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numbers>
#include <string>

#include "fsdp/error.h"

namespace fsdp {
namespace {

TEST(LRSchedule, WarmUpMovesAtTheFirstStepAndEndsAtTheFullRate) {
  const ScheduleOptions options{.total_steps = 100, .warmup_steps = 10};
  for (const auto& schedule :
       {LRSchedule::constant(options), LRSchedule::linear(options), LRSchedule::cosine(options)}) {
    for (int step = 0; step < 10; ++step) EXPECT_DOUBLE_EQ(schedule.at(step), (step + 1) / 10.0);
    EXPECT_EQ(schedule.at(10), 1.0);
  }
}

TEST(LRSchedule, WithoutWarmUpTheFirstStepHasTheFullRate) {
  EXPECT_EQ(LRSchedule::constant().at(0), 1.0);
  EXPECT_EQ(LRSchedule::linear({.total_steps = 5}).at(0), 1.0);
  EXPECT_EQ(LRSchedule::cosine({.total_steps = 5}).at(0), 1.0);
  EXPECT_EQ(LRSchedule::wsd({.total_steps = 5, .decay_steps = 2}).at(0), 1.0);
}

TEST(LRSchedule, ConstantStaysForEver) {
  const auto schedule = LRSchedule::constant({.warmup_steps = 3});
  EXPECT_DOUBLE_EQ(schedule.at(1), 2.0 / 3);
  EXPECT_EQ(schedule.at(3), 1.0);
  EXPECT_EQ(schedule.at(1'000'000'000), 1.0);
}

TEST(LRSchedule, LinearFallsInEqualSteps) {
  const auto schedule =
      LRSchedule::linear({.total_steps = 110, .warmup_steps = 10, .final_ratio = 0.2});
  for (int step = 10; step <= 110; ++step)
    EXPECT_NEAR(schedule.at(step), 1 - 0.8 * (step - 10) / 100.0, 1e-15) << step;
}

TEST(LRSchedule, CosineFollowsItsFormula) {
  const auto schedule =
      LRSchedule::cosine({.total_steps = 210, .warmup_steps = 10, .final_ratio = 0.1});
  for (int step = 10; step <= 210; ++step)
    EXPECT_NEAR(schedule.at(step),
                0.1 + 0.45 * (1 + std::cos(std::numbers::pi * (step - 10) / 200.0)), 1e-15)
        << step;
}

TEST(LRSchedule, WsdIsStableUntilItsDecay) {
  const ScheduleOptions options{
      .total_steps = 100, .warmup_steps = 10, .decay_steps = 20, .final_ratio = 0.1};
  const auto line = LRSchedule::wsd(options);
  const auto root = LRSchedule::wsd(options, Decay::SQRT);
  const auto cosine = LRSchedule::wsd(options, Decay::COSINE);
  for (int step = 10; step <= 80; ++step)
    for (const auto& schedule : {line, root, cosine}) EXPECT_EQ(schedule.at(step), 1.0) << step;
  for (int step = 81; step < 100; ++step) {
    const double progress = (step - 80) / 20.0;
    EXPECT_NEAR(line.at(step), 0.1 + 0.9 * (1 - progress), 1e-15) << step;
    EXPECT_NEAR(root.at(step), 0.1 + 0.9 * (1 - std::sqrt(progress)), 1e-15) << step;
    EXPECT_NEAR(cosine.at(step), 0.1 + 0.45 * (1 + std::cos(std::numbers::pi * progress)), 1e-15)
        << step;
  }
}

TEST(LRSchedule, TheEndHasTheFinalRatioAndKeepsIt) {
  const ScheduleOptions options{.total_steps = 50, .warmup_steps = 5, .final_ratio = 0.05};
  auto stable = options;
  stable.decay_steps = 10;
  for (const auto& schedule :
       {LRSchedule::linear(options), LRSchedule::cosine(options), LRSchedule::wsd(stable)}) {
    EXPECT_EQ(schedule.at(50), 0.05);
    EXPECT_EQ(schedule.at(5000), 0.05);
  }
}

TEST(LRSchedule, NeverRisesAfterTheWarmUp) {
  ScheduleOptions options{.total_steps = 37, .warmup_steps = 7, .final_ratio = 0.3};
  auto stable = options;
  stable.decay_steps = 30;
  for (const auto& schedule :
       {LRSchedule::linear(options), LRSchedule::cosine(options), LRSchedule::wsd(stable)})
    for (int step = 7; step < 60; ++step) EXPECT_LE(schedule.at(step + 1), schedule.at(step));
}

TEST(LRSchedule, AWarmUpMayTakeAllSteps) {
  const auto schedule = LRSchedule::cosine({.total_steps = 4, .warmup_steps = 4});
  EXPECT_EQ(schedule.at(3), 1.0);
  EXPECT_EQ(schedule.at(4), 0.0);
}

void expect_error(const std::function<void()>& make, const std::string& field) {
  try {
    make();
    ADD_FAILURE() << "no error about " << field;
  } catch (const Error& error) {
    EXPECT_NE(error.message().find(field), std::string::npos) << error.what();
    EXPECT_FALSE(error.hint().empty());
  }
}

TEST(LRSchedule, BadOptionsAreErrorsThatNameTheField) {
  expect_error([] { LRSchedule::linear({}); }, "total_steps");
  expect_error([] { LRSchedule::linear({.total_steps = -5}); }, "total_steps = -5");
  expect_error([] { LRSchedule::cosine({.total_steps = 10, .warmup_steps = -1}); },
               "warmup_steps = -1");
  expect_error([] { LRSchedule::cosine({.total_steps = 10, .warmup_steps = 11}); },
               "warmup_steps = 11");
  expect_error([] { LRSchedule::wsd({.total_steps = 10, .warmup_steps = 5, .decay_steps = 6}); },
               "decay_steps = 6");
  expect_error([] { LRSchedule::wsd({.total_steps = 10, .decay_steps = -6}); }, "decay_steps = -6");
  expect_error([] { LRSchedule::cosine({.total_steps = 10, .decay_steps = 5}); },
               "decay_steps = 5");
  expect_error([] { LRSchedule::linear({.total_steps = 10, .final_ratio = 1.5}); },
               "final_ratio = 1.5");
  expect_error([] { LRSchedule::linear({.total_steps = 10, .final_ratio = std::nan("")}); },
               "final_ratio");
  expect_error([] { LRSchedule::constant({.warmup_steps = -2}); }, "warmup_steps = -2");
  expect_error([] { LRSchedule::constant().at(-1); }, "step = -1");
}

}  // namespace
}  // namespace fsdp
