#include "optim/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

namespace mantissa::schedule_test {

constexpr double kPeak = 1e-3;
constexpr ScheduleType kTypes[] = {ScheduleType::cosine, ScheduleType::linear, ScheduleType::constant, ScheduleType::wsd};

// nanoGPT's get_lr, written out from its description: rates in units of learning_rate, lr_decay_iters = max_iters.
double nanogpt_rate(double min_lr, int64_t warmup, int64_t decay_iters, int64_t it) {
  if (it < warmup) return kPeak * static_cast<double>(it + 1) / static_cast<double>(warmup + 1);
  if (it > decay_iters) return min_lr;
  const double ratio = static_cast<double>(it - warmup) / static_cast<double>(decay_iters - warmup);
  return min_lr + 0.5 * (1.0 + std::cos(std::acos(-1.0) * ratio)) * (kPeak - min_lr);
}

TEST(Schedule, CosineToTheEndIsNanoGpts) {
  ScheduleConfig schedule;
  schedule.type = ScheduleType::cosine, schedule.warmup_steps = 100;
  for (int64_t step = 0; step < 2000; ++step)
    ASSERT_NEAR(learning_rate(schedule, kPeak, 2000, step), nanogpt_rate(0.1 * kPeak, 100, 2000, step), 1e-15) << step;
}

// The warmup rises linearly and reaches the peak right after; one that is longer than the run never passes it.
TEST(Schedule, WarmsUpToThePeak) {
  for (const ScheduleType type : kTypes) {
    ScheduleConfig schedule;
    schedule.type = type;
    for (const int64_t warmup : {0, 4, 50}) {
      schedule.warmup_steps = warmup;
      for (int64_t step = 0; step <= std::min<int64_t>(warmup, 9); ++step) {
        const double part = static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
        EXPECT_NEAR(learning_rate(schedule, kPeak, 10, step), kPeak * part, 1e-15) << warmup << ' ' << step;
      }
    }
  }
}

// Decay steps are counted from the end of the warmup, and by wsd from the end of the run.
TEST(Schedule, DecaysToItsRatio) {
  const ScheduleConfig linear{.type = ScheduleType::linear, .warmup_steps = 10, .decay_steps = 20, .min_lr_ratio = 0.5},
      wsd{.type = ScheduleType::wsd, .warmup_steps = 10, .decay_steps = 20, .min_lr_ratio = 0.0},
      constant{.type = ScheduleType::constant, .warmup_steps = 2, .decay_steps = {}, .min_lr_ratio = 0.1};
  const std::tuple<ScheduleConfig, int64_t, int64_t, double> cases[] = {
      {linear, 1000, 20, 0.75}, {linear, 1000, 30, 0.5}, {linear, 1000, 999, 0.5}, {wsd, 100, 80, 1.0},
      {wsd, 100, 90, 0.5},      {wsd, 100, 99, 0.05},    {constant, 10, 9, 1.0}};
  for (const auto& [schedule, steps, step, ratio] : cases)
    EXPECT_NEAR(learning_rate(schedule, kPeak, steps, step), kPeak * ratio, 1e-15) << ratio << " at " << step;
}

}  // namespace mantissa::schedule_test
