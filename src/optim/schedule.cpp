#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace mantissa {

double learning_rate(const ScheduleConfig& schedule, double peak, int64_t steps, int64_t step) {
  const int64_t warmup = schedule.warmup_steps;
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  if (schedule.type == ScheduleType::constant) return peak;
  const int64_t decay = std::max<int64_t>(1, schedule.decay_steps.value_or(steps - warmup));
  const int64_t start = schedule.type == ScheduleType::wsd ? std::max(warmup, steps - decay) : warmup;
  const double progress = std::clamp(static_cast<double>(step - start) / static_cast<double>(decay), 0.0, 1.0);
  const double low = peak * schedule.min_lr_ratio;
  const double left = schedule.type == ScheduleType::cosine ? 0.5 * (1.0 + std::cos(std::numbers::pi * progress)) : 1.0 - progress;
  return low + left * (peak - low);
}

}  // namespace mantissa
