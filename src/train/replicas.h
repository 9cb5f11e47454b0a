// Checks that ranks still have the same weights where they should: memory and networks may change bits unnoticed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/config/run_config.h"
#include "metrics/run_folder.h"
#include "optim/optimizer.h"

namespace mantissa {

// Compares values and codes that forward reads with those of their owner in the data group; tensors that tensor ranks hold alike, masters
// and moments, too, with those of the first; and buffers with those of rank 0. All ranks make this call between steps; it takes a few small
// exchanges of hashes. Throws Error(numerical) on all ranks that names rank and tensor.
void require_same_replicas(const Optimizer& optimizer, const ParameterSet& parameters);

// Finds ranks that the others wait for. A slow rank does not end a job, but every step takes as long as its slowest rank. A rank is
// reported when its speed, in steps per second of its own computation, was below 0.7x the median in 10 windows of 10 steps in a row, and
// again only after a window in which it was not slow. Of an even number of speeds the median is the upper middle one, so that one of two
// ranks can be a straggler.

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

// Checks that the CPU keeps what a run promises about equal bits.

// Throws Error(environment) that names a workaround if bits of GEMMs depend on the position of a row or column or on zeros behind the depth
// (Backend::unequal_places()). `consequence` begins with what is at stake: "results would depend on the number of ranks".
void require_equal_places(const Backend& device, const std::string& consequence);

// Makes this check for a run with experts, several ranks or padding of the vocabulary, and logs that it holds; does nothing for other runs.
void require_equal_places(const RunConfig& config, const Backend& device);

}  // namespace mantissa
