#include "train/stragglers.h"

#include <algorithm>
#include <utility>

#include "mantissa/base/error.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

// Returns the median; of two in the middle the lower one, which is the upper one of speeds.
double lower_median(std::vector<double> seconds) {
  std::ranges::sort(seconds);
  return seconds[(seconds.size() - 1) / 2];
}

}  // namespace

std::vector<Straggler> Stragglers::add(std::span<const double> seconds) {
  require(seconds.size() == sums_.size(), "stragglers: times of ", seconds.size(), " ranks, and there are ", sums_.size());
  for (size_t rank = 0; rank < sums_.size(); ++rank) sums_[rank] += seconds[rank];
  if (++steps_ < kWindowSteps) return {};
  steps_ = 0;
  const std::vector<double> window = std::exchange(sums_, std::vector<double>(sums_.size()));
  const double median = lower_median(window);
  std::vector<Straggler> out;
  for (size_t rank = 0; rank < window.size(); ++rank) {
    const bool slow = median < kSlow * window[rank];
    slow_[rank] = slow ? slow_[rank] + 1 : 0;
    if (slow_[rank] == kWindows) out.push_back({.rank = static_cast<int>(rank), .ratio = median / window[rank]});
  }
  return out;
}

void report_stragglers(Stragglers& stragglers, std::span<const double> seconds, int64_t step, std::optional<Metrics>& metrics) {
  if (seconds.empty() || !metrics) return;
  for (const Straggler& straggler : stragglers.add(seconds)) {
    const StragglerEvent event{.step = step, .rank = straggler.rank, .section = "forward and backward", .ratio = straggler.ratio};
    log_warning("step ", step, ": the others wait for rank ", event.rank, ", whose ", event.section, " ran below ", Stragglers::kSlow,
                " of the median speed for ", Stragglers::kWindows * Stragglers::kWindowSteps, " steps; in the last ",
                Stragglers::kWindowSteps, " at ", event.ratio);
    metrics->write(event);
  }
}

}  // namespace mantissa
