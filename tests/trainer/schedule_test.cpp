#include "trainer/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace palimpsest {
namespace {

ScheduleConfig schedule(ScheduleKind kind, int64_t warmup_steps, double min_lr,
                        std::optional<int64_t> decay_steps = std::nullopt) {
  ScheduleConfig config;
  config.kind = kind;
  config.warmup_steps = warmup_steps;
  config.min_lr = min_lr;
  config.decay_steps = decay_steps;
  return config;
}

// Learning rates of steps 1, 2, ... against a table worked out by hand; the ends of a line must be exact.
void expect_table(const ScheduleConfig& config, double peak, const std::vector<double>& table) {
  const auto total = static_cast<int64_t>(table.size());
  for (int64_t step = 1; step <= total; ++step) {
    const double lr = learning_rate(config, peak, step, total);
    EXPECT_NEAR(lr, table[step - 1], 1e-15 * peak) << "step " << step;
    if (table[step - 1] == peak || table[step - 1] == config.min_lr) {
      EXPECT_EQ(lr, table[step - 1]) << "step " << step;
    }
  }
}

TEST(Schedule, LinearFollowsItsTable) {
  expect_table(schedule(ScheduleKind::kLinear, 4, 0.0), 1.0,
               {0.25, 0.5, 0.75, 1.0, 5.0 / 6, 4.0 / 6, 3.0 / 6, 2.0 / 6, 1.0 / 6, 0.0});
}

TEST(Schedule, LinearStopsAtTheLeastRate) {
  expect_table(schedule(ScheduleKind::kLinear, 2, 1.0), 5.0, {2.5, 5.0, 4.0, 3.0, 2.0, 1.0});
}

TEST(Schedule, CosineFollowsItsTable) {
  const double half_root = std::sqrt(0.5);  // cos(pi / 4)
  expect_table(schedule(ScheduleKind::kCosine, 4, 0.0), 1.0,
               {0.25, 0.5, 0.75, 1.0, (1 + half_root) / 2, 0.5, (1 - half_root) / 2, 0.0});
  expect_table(schedule(ScheduleKind::kCosine, 2, 1.0), 3.0, {1.5, 3.0, 2 + half_root, 2.0, 2 - half_root, 1.0});
}

TEST(Schedule, WsdIsStableAndThenDecays) {
  expect_table(schedule(ScheduleKind::kWsd, 2, 0.0, 4), 1.0, {0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0});
  // A fifth of 11 steps, rounded up, when not told otherwise.
  expect_table(schedule(ScheduleKind::kWsd, 1, 0.1), 1.0, {1, 1, 1, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1});
  // The decay does not begin within the warm-up.
  expect_table(schedule(ScheduleKind::kWsd, 2, 0.0, 100), 1.0, {0.5, 1, 0.75, 0.5, 0.25, 0.0});
  expect_table(schedule(ScheduleKind::kWsd, 2, 0.0, 0), 1.0, {0.5, 1, 1, 1});
}

TEST(Schedule, ConstantStaysAtThePeak) {
  expect_table(schedule(ScheduleKind::kConstant, 2, 0.5), 3.0, {1.5, 3, 3, 3});
}

TEST(Schedule, WithoutWarmupTheFirstStepIsBelowThePeakByOnePart) {
  expect_table(schedule(ScheduleKind::kLinear, 0, 0.0), 1.0, {0.75, 0.5, 0.25, 0.0});
  expect_table(schedule(ScheduleKind::kWsd, 0, 0.0, 2), 1.0, {1, 1, 0.5, 0.0});
  expect_table(schedule(ScheduleKind::kConstant, 0, 0.0), 1.0, {1, 1});
}

TEST(Schedule, WarmupMayBeTheWholeRunOrLonger) {
  for (const ScheduleKind kind :
       {ScheduleKind::kLinear, ScheduleKind::kCosine, ScheduleKind::kWsd, ScheduleKind::kConstant}) {
    expect_table(schedule(kind, 4, 0.0), 1.0, {0.25, 0.5, 0.75, 1.0});
    expect_table(schedule(kind, 8, 0.0), 1.0, {0.125, 0.25, 0.375, 0.5});
    expect_table(schedule(kind, 1, 0.0), 1.0, {1.0});
  }
}

TEST(Schedule, StepsBeyondTheEndStayThere) {
  EXPECT_EQ(learning_rate(schedule(ScheduleKind::kCosine, 4, 0.125), 1.0, 1000, 10), 0.125);
  EXPECT_EQ(learning_rate(schedule(ScheduleKind::kConstant, 4, 0.125), 1.0, 1000, 10), 1.0);
}

TEST(Schedule, StepsCountFromOne) {
  EXPECT_THROW(learning_rate(schedule(ScheduleKind::kLinear, 4, 0.0), 1.0, 0, 10), Error);
  EXPECT_THROW(learning_rate(schedule(ScheduleKind::kLinear, 4, 0.0), 1.0, 1, 0), Error);
}

TEST(Schedule, ExtremeLengthsStayInRange) {
  for (const ScheduleKind kind : {ScheduleKind::kLinear, ScheduleKind::kCosine, ScheduleKind::kWsd}) {
    for (const int64_t step : {int64_t{1}, int64_t{1} << 40, INT64_MAX}) {
      for (const int64_t decay : {int64_t{0}, int64_t{5}, INT64_MAX}) {
        const double lr = learning_rate(schedule(kind, 3, 0.25, decay), 1.0, step, INT64_MAX);
        EXPECT_GE(lr, 0.25);
        EXPECT_LE(lr, 1.0);
      }
    }
  }
}

TEST(Schedule, NoticesWhatTheRunIsTooShortFor) {
  EXPECT_TRUE(schedule_notices(schedule(ScheduleKind::kWsd, 4, 0.0, 6), 10).empty());
  EXPECT_TRUE(schedule_notices(schedule(ScheduleKind::kCosine, 10, 0.0, 100), 10).empty());
  const auto short_run = schedule_notices(schedule(ScheduleKind::kCosine, 11, 0.0), 10);
  ASSERT_EQ(short_run.size(), 1u);
  EXPECT_EQ(short_run[0],
            "the run ends at step 10, within the 11 steps of schedule.warmup_steps: optimizer.lr is not reached");
  const auto short_decay = schedule_notices(schedule(ScheduleKind::kWsd, 4, 0.0, 7), 10);
  ASSERT_EQ(short_decay.size(), 1u);
  EXPECT_EQ(short_decay[0], "schedule.decay_steps is 7, but warm-up leaves 6 of 10 steps: the decay is cut to them");
  for (const ScheduleKind kind : {ScheduleKind::kCosine, ScheduleKind::kLinear, ScheduleKind::kWsd}) {
    const auto one_step = schedule_notices(schedule(kind, 0, 0.0), 1);
    ASSERT_EQ(one_step.size(), 1u);
    EXPECT_NE(one_step[0].find("nothing is learnt"), std::string::npos) << one_step[0];
    EXPECT_TRUE(schedule_notices(schedule(kind, 1, 0.0), 1).empty());
    EXPECT_TRUE(schedule_notices(schedule(kind, 0, 0.1), 1).empty());
    EXPECT_TRUE(schedule_notices(schedule(kind, 0, 0.0), 2).empty());
  }
  EXPECT_TRUE(schedule_notices(schedule(ScheduleKind::kConstant, 0, 0.0), 1).empty());
}

}  // namespace
}  // namespace palimpsest
