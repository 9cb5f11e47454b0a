#include "comm/progress.h"

#include <algorithm>
#include <chrono>
#include <string_view>

#include "mantissa/base/error.h"

namespace mantissa {
namespace {

constexpr int kFewSteps = 5;
constexpr double kFirstStepsSeconds = 600, kLeastStepSeconds = 30, kSlowStep = 5;
constexpr double kMeanSteps = 20;

bool is_step(const char* section) { return std::string_view(section) == "step"; }

double step_timeout(const Progress& progress) {
  if (progress.measured_steps() < kFewSteps) return kFirstStepsSeconds;
  return std::max(kLeastStepSeconds, kSlowStep * progress.mean_step_seconds());
}

}  // namespace

double monotonic_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void Progress::set_phase(int64_t step, const char* section) {
  const double now = monotonic_now();
  if (step > step_ && is_step(section_)) {
    const int count = measured_ + 1;
    const double seconds = now - since_, mean = mean_;
    mean_ = mean + (seconds - mean) / std::min<double>(count, kMeanSteps);
    measured_ = count;
  }
  step_.store(step, std::memory_order_relaxed);
  since_.store(now, std::memory_order_relaxed);
  section_.store(section, std::memory_order_release);
}

std::string watchdog_timeout(const Progress& progress, const WatchdogTimeouts& timeouts, double now, double running_since) {
  const char* const section = progress.section();
  const bool step = is_step(section);
  const double limit = step ? timeouts.step_timeout_s.value_or(step_timeout(progress)) : timeouts.section_timeout_s;
  if (now <= std::max(progress.since(), running_since) + limit) return "";
  return text("no progress for ", limit, " s (parallel.", step ? "step" : "section", "_timeout_s), at step ", progress.step(), " (",
              section, ")");
}

}  // namespace mantissa
