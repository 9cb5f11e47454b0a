// The one message by which the ranks of a step decide alike: each sends its flag, vote, seconds, traffic, losses, assignments of experts
// and partial norms, and reads those of all.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "nn/shards.h"

namespace mantissa {

// Holds the losses of a step's micro batches, [M] fp64, and the order of their sum (FinishGradients).
struct StepLosses {
  Tensor losses;
  bool pairwise = false;
  int vote = 0;                          // this rank's request
  std::function<double()> seconds = {};  // time that it computed for the losses; called after a wait for the device
  Tensor figures = {};                   // fp64 (optional); they come to the host with the decision
  // Makes of these figures the expert assignments of this rank's micro batches: whole numbers, as many on all ranks.
  std::function<std::vector<double>(std::span<const double> figures)> assignments = {};
  std::function<void()> meanwhile = {};  // called when all of the step is asked for, before the host waits for its result

  std::vector<double> assignments_of(std::span<const double> of) const { return assignments ? assignments(of) : std::vector<double>(); }
};

// Layout of a rank's control message, by which all ranks decide alike: kReportedNumbers doubles, then losses, expert assignments, partial
// norms.
inline constexpr int64_t kReportedNumbers = 8;

struct UpdateResult {
  double loss;
  double gradient_norm;  // before clipping
  bool bad_weights;      // a quantized weight is NaN or Inf
  bool skipped;          // because of that, or since loss or norm are: masters, moments and the update counter stay as they are
  int vote;              // the largest of all ranks
  Traffic sent;          // by all ranks up to then
  // StepLosses::seconds by rank; empty for one.
  std::vector<double> seconds;
  std::vector<double> assignments;  // StepLosses::assignments of all data ranks, added up
  std::vector<double> figures;      // StepLosses::figures of this rank
};

// Report of a rank about its step.
struct OwnReport {
  double flag;
  std::span<const double> losses;
  std::vector<double> assignments;
  std::span<const double> partials;
};

// Every rank decides by the partial norms, losses and flags of all.
void exchange_control(const Shards& shards, const StepLosses& step, const OwnReport& says, FinishGradients& finish, UpdateResult& result);

}  // namespace mantissa
