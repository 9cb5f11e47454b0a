// Runs one optimizer step: gradients of a global batch, their norm, the update.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mantissa/config/training_options.h"
#include "mantissa/data/batch.h"
#include "mantissa/models/gpt.h"
#include "mantissa/ops/rounding_scope.h"
#include "mantissa/optim/accumulation.h"
#include "mantissa/optim/optimizer.h"
#include "mantissa/train/device_batch.h"

namespace mantissa {

struct StepResult {
  double loss;           // sum over the targets that count, divided by their number; 0 without any
  int64_t targets;       // number of them, over all ranks
  int64_t padding;       // padding among the tokens of all ranks
  double gradient_norm;  // before clipping
  bool skipped;
  std::string bad;  // why: the first value that is not finite
  int vote;         // the largest of all ranks
  Traffic sent;     // by all ranks, from their start to the gradients of this step
  // Seconds each rank spent in forward and backward, excluding waits for other ranks. Empty for a single rank.
  std::vector<double> seconds;
  RouterFigures routers;        // the figures that routing holds
  std::vector<double> routing;  // figures of RouterStatistics, of this rank's micro batches
};

// Adds the gradients of a micro batch to those that are there. Returns its loss: the sum over its targets divided by target_count, that of
// the whole batch.
Tensor forward_and_backward(Gpt& model, const DeviceBatch& rows, int64_t target_count, RouterStatistics& routing);

struct StepOptions {
  std::function<int()> vote = {};  // returns what this rank asks for, at the end of its backward passes
  RouterFigures routers = RouterFigures::counts_and_losses;
  std::vector<DeviceBatch> uploaded = {};  // the micro batches of the batch: all, or none, which are then uploaded one by one
  RoundingPosition rounding = {};          // position of the first sequence of the batch
  std::function<void()> meanwhile = {};    // called when all of the step is asked for, before the host waits for its result
};

// Splits `batch` into equal micro batches of micro_batch_size sequences. Targets are counted before the first backward pass. If a weight,
// loss or norm is not finite, nothing is updated, neither weights nor expert biases. The memory of an uploaded micro batch goes with its
// backward pass.
StepResult training_step(Gpt& model, Optimizer& optimizer, GradientAccumulator& accumulator, const Batch& batch, int64_t micro_batch_size,
                         double lr, StepOptions options = {});

}  // namespace mantissa
