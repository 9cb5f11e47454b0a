// The numbers by which a step is decided, and the one message by which the ranks decide alike: each sends its flag, vote, seconds, traffic,
// losses, assignments of experts and partial norms, and reads those of all.
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
};

// Layout of a rank's control message, numbers of 8 bytes: kReportedNumbers of its report, then losses, expert assignments, partial norms.
inline constexpr int64_t kReportedNumbers = 8;

// Report of all ranks about a step, beside what decides it.
struct StepReport {
  int vote = 0;                          // the largest of all ranks
  Traffic sent = {};                     // by all ranks, from their start to the gradients of this step
  std::vector<double> seconds = {};      // StepLosses::seconds by rank; empty for a single rank
  std::vector<double> assignments = {};  // StepLosses::assignments of all data ranks, added up
  std::vector<double> figures = {};      // StepLosses::figures of this rank
};

struct UpdateResult : StepReport {
  double loss = 0.0;
  double gradient_norm = 0.0;  // before clipping
  bool bad_weights = false;    // a quantized weight is NaN or Inf
  bool skipped = false;        // because of that, or since loss or norm are: masters, moments and the update counter stay as they are
};

// Decides the steps of an optimizer. The ranks call it together, in this order.
class StepControl {
 public:
  explicit StepControl(const Shards& shards) : shards_(shards) {}  // which must outlive it

  // Begins a step. Returns the tensor in which its partial norms are then written.
  const Tensor& begin(Backend& device, const StepLosses& step);
  // Writes StepValue and StepOutcome by the norms, losses and flags (ParameterSet::nonfinite()) of all ranks, and asks for them, so that
  // the host waits for no update.
  void decide(const StepLosses& step, const Tensor& flags, const Tensor& values, double clip);
  // Waits for the decision.
  UpdateResult result(const StepLosses& step);

 private:
  void exchange(const StepLosses& step, FinishGradients& finish);
  Tensor of_host() const;  // the part of all_ that the host reads of every step

  const Shards& shards_;
  StepReport report_;
  // Values that the host reads of a step, fp64, in one tensor: one download has any run of the next five.
  Tensor all_;
  Tensor outcome_;                           // StepOutcome
  Tensor figures_;                           // StepLosses::figures
  Tensor flag_;                              // ParameterSet::nonfinite()
  Tensor losses_;                            // StepLosses::losses
  Tensor partials_;                          // squared norms of row blocks
  std::function<void(void*)> outcome_here_;  // waits for the outcome and, alone, for the figures behind it
};

}  // namespace mantissa
