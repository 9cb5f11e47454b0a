// Times that a main thread may be without progress.
#include "comm/progress.h"

#include <gmock/gmock.h>

#include <chrono>
#include <thread>

namespace mantissa::progress_test {

using ::testing::IsEmpty;
using ::testing::Not;

// The watchdog's message `seconds` after the latest progress.
std::string after(const Progress& progress, double seconds, const WatchdogTimeouts& timeouts = {}) {
  return watchdog_timeout(progress, timeouts, progress.since() + seconds);
}

void take_steps(Progress& progress, int64_t steps) {
  for (int64_t step = 0; step <= steps; ++step) progress.set_phase(step, "step");
}

TEST(Progress, StepsAndSectionsHaveAllowancesOfTheirOwn) {
  Progress progress;
  EXPECT_THAT(after(progress, 419), IsEmpty());
  EXPECT_EQ(after(progress, 421), "no progress for 420 s (parallel.section_timeout_s), at step 0 (start)");
  progress.set_phase(7, "save");
  EXPECT_THAT(after(progress, 1.9, {.section_timeout_s = 2}), IsEmpty());
  EXPECT_EQ(after(progress, 2.1, {.section_timeout_s = 2}), "no progress for 2 s (parallel.section_timeout_s), at step 7 (save)");

  Progress steps;  // the first ones may be long, unless a timeout is stated
  steps.set_phase(0, "step");
  EXPECT_THAT(after(steps, 1.4, {.step_timeout_s = 1.5}), IsEmpty());
  EXPECT_EQ(after(steps, 1.6, {.step_timeout_s = 1.5}), "no progress for 1.5 s (parallel.step_timeout_s), at step 0 (step)");
  take_steps(steps, 4);
  EXPECT_THAT(after(steps, 599), IsEmpty());
  EXPECT_EQ(after(steps, 601), "no progress for 600 s (parallel.step_timeout_s), at step 4 (step)");
  steps.set_phase(5, "step");
  EXPECT_EQ(steps.measured_steps(), 5);
  EXPECT_THAT(after(steps, 29), IsEmpty());
  EXPECT_EQ(after(steps, 31), "no progress for 30 s (parallel.step_timeout_s), at step 5 (step)");
}

TEST(Progress, TimeoutsStartOverForWhoWasStopped) {
  Progress progress;
  Stops stops(1);
  const double began = progress.since();
  EXPECT_EQ(stops.running_since(began + 0.9), 0);
  EXPECT_EQ(stops.running_since(began + 1.8), 0);
  EXPECT_EQ(stops.running_since(began + 9), began + 9) << "late itself";
  EXPECT_EQ(stops.running_since(began + 9.9), began + 9);
  EXPECT_THAT(watchdog_timeout(progress, {.section_timeout_s = 2}, began + 10.9, began + 9), IsEmpty());
  EXPECT_THAT(watchdog_timeout(progress, {.section_timeout_s = 2}, began + 11.1, began + 9), Not(IsEmpty()));
}

// A step that waited for something, or one that had nothing to do, says little about the next.
TEST(Progress, OneOddStepMovesTheMeanByItsShare) {
  Progress progress;
  take_steps(progress, 9);
  const double before = progress.mean_step_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const double odd = monotonic_now() - progress.since();
  progress.set_phase(10, "step");
  EXPECT_NEAR(progress.mean_step_seconds(), before + (odd - before) / 10, 0.05 * odd);
}

TEST(Progress, OnlyStepsAreMeasuredAndEachCallIsProgress) {
  Progress progress;
  const double began = monotonic_now();
  progress.set_phase(100, "step");  // a run that continues, which has taken none yet
  EXPECT_EQ(progress.measured_steps(), 0);
  progress.set_phase(101, "evaluation");
  const double before = progress.since();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  progress.set_phase(101, "evaluation");
  EXPECT_GT(progress.since(), before);
  const double evaluated = progress.since() - before;
  progress.set_phase(101, "step");
  progress.set_phase(102, "step");
  EXPECT_EQ(progress.measured_steps(), 2);
  EXPECT_LE(2 * progress.mean_step_seconds(), monotonic_now() - began - evaluated);
}

}  // namespace mantissa::progress_test
