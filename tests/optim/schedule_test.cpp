#include "mantissa/optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace mantissa::schedule_test {

constexpr double kPeak = 1e-3;

// Decay to the end.
ScheduleConfig schedule_of(ScheduleType type, int64_t warmup_steps) {
  ScheduleConfig schedule;
  schedule.type = type;
  schedule.warmup_steps = warmup_steps;
  return schedule;
}

// nanoGPT's get_lr, written out from its description: rates in units of learning_rate, lr_decay_iters = max_iters.
double nanogpt_rate(double min_lr, int64_t warmup, int64_t decay_iters, int64_t it) {
  if (it < warmup) return kPeak * static_cast<double>(it + 1) / static_cast<double>(warmup + 1);
  if (it > decay_iters) return min_lr;
  const double ratio = static_cast<double>(it - warmup) / static_cast<double>(decay_iters - warmup);
  return min_lr + 0.5 * (1.0 + std::cos(std::acos(-1.0) * ratio)) * (kPeak - min_lr);
}

TEST(Schedule, CosineToTheEndIsNanoGpts) {
  const ScheduleConfig schedule = schedule_of(ScheduleType::cosine, 100);
  for (int64_t step = 0; step < 2000; ++step) {
    ASSERT_NEAR(learning_rate(schedule, kPeak, 2000, step), nanogpt_rate(0.1 * kPeak, 100, 2000, step), 1e-15) << step;
  }
}

TEST(Schedule, WarmupRisesLinearlyAndReachesThePeakRightAfter) {
  for (const ScheduleType type : {ScheduleType::cosine, ScheduleType::linear, ScheduleType::constant, ScheduleType::wsd}) {
    const ScheduleConfig schedule = schedule_of(type, 4);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, kPeak, 100, 0), kPeak * 0.2);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, kPeak, 100, 3), kPeak * 0.8);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, kPeak, 100, 4), kPeak);
  }
}

TEST(Schedule, WithoutWarmupTheFirstStepIsAtThePeak) {
  EXPECT_DOUBLE_EQ(learning_rate(schedule_of(ScheduleType::linear, 0), kPeak, 10, 0), kPeak);
}

TEST(Schedule, DecayStepsAreCountedFromTheEndOfTheWarmup) {
  const ScheduleConfig schedule{.type = ScheduleType::linear, .warmup_steps = 10, .decay_steps = 20, .min_lr_ratio = 0.5};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, kPeak, 1000, 20), kPeak * 0.75);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, kPeak, 1000, 30), kPeak * 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, kPeak, 1000, 999), kPeak * 0.5);
}

TEST(Schedule, ConstantStaysAtThePeak) { EXPECT_DOUBLE_EQ(learning_rate(schedule_of(ScheduleType::constant, 2), kPeak, 10, 9), kPeak); }

TEST(Schedule, WsdIsStableThenFallsLinearlyAtTheEnd) {
  const ScheduleConfig schedule{.type = ScheduleType::wsd, .warmup_steps = 10, .decay_steps = 20, .min_lr_ratio = 0.0};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, kPeak, 100, 80), kPeak);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, kPeak, 100, 90), kPeak * 0.5);
  EXPECT_NEAR(learning_rate(schedule, kPeak, 100, 99), kPeak * 0.05, 1e-15);
}

TEST(Schedule, WarmupLongerThanTheRunNeverPassesThePeak) {
  for (const ScheduleType type : {ScheduleType::cosine, ScheduleType::linear, ScheduleType::constant, ScheduleType::wsd}) {
    for (int64_t step = 0; step < 10; ++step) {
      const double rate = learning_rate(schedule_of(type, 50), kPeak, 10, step);
      EXPECT_TRUE(rate > 0.0 && rate < kPeak) << rate;
    }
  }
}

}  // namespace mantissa::schedule_test
