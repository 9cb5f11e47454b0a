// Finds ranks that the others wait for. A slow rank does not end a job, but every step takes as long as its slowest rank. A rank is
// reported when its speed, in steps per second of its own computation, was below 0.7x the median in 10 windows of 10 steps in a row, and
// again only after a window in which it was not slow. Of an even number of speeds the median is the upper middle one, so that one of two
// ranks can be a straggler.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "mantissa/metrics/run_folder.h"

namespace mantissa {

struct Straggler {
  int rank = 0;
  double ratio = 0.0;  // its speed / the median, in the latest window
};

class Stragglers {
 public:
  static constexpr int kWindowSteps = 10, kWindows = 10;
  static constexpr double kSlow = 0.7;

  explicit Stragglers(int ranks) : sums_(static_cast<size_t>(ranks)), slow_(static_cast<size_t>(ranks)) {}

  // Takes the seconds that each rank r computed in one step, without its waits. Returns the ranks to be reported now.
  std::vector<Straggler> add(std::span<const double> seconds);

 private:
  std::vector<double> sums_;  // sums of this window, by rank
  std::vector<int> slow_;     // windows in a row, by rank
  int steps_ = 0;             // steps of this window
};

// Records one step of all ranks (StepResult::seconds; empty for one rank). Rank 0, which has metrics, writes a line and a warning for each
// reported rank.
void report_stragglers(Stragglers& stragglers, std::span<const double> seconds, int64_t step, std::optional<Metrics>& metrics);

}  // namespace mantissa
