// Runs one optimizer step: gradients of a global batch, their norm, the update.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/training_options.h"
#include "data/batch.h"
#include "models/gpt.h"
#include "nn/moe.h"
#include "ops/ops.h"
#include "optim/accumulation.h"
#include "optim/optimizer.h"

namespace mantissa {

// Moves a batch of the data layer to the device.

struct DeviceBatch {
  TokenBatch tokens;
  Tensor targets;  // [batch * length] i32
};

// Uploads sequences [first, first + count) of the batch to the device of the model. Kernels trust indices, since a device cannot throw, so
// every id, target, position and segment start is checked here. Throws Error(data) for an id or a target outside the vocabulary,
// Error(internal) for the others, naming sequence and position.
DeviceBatch to_device(const Gpt& model, const Batch& batch, int64_t first, int64_t count);

// Hands out the batches of a run, step by step. The next one can be read and uploaded while the device computes, which a host that only
// asks for kernels has time for.

struct StepBatch {
  Batch rows;                              // sequences of this rank
  std::vector<DeviceBatch> uploaded = {};  // its micro batches if they were prefetched
};

class StepBatches {
 public:
  // Numbers of sequences that a rank takes of each step.
  struct Sizes {
    int64_t sequences = 0, micro_batch_size = 0;
  };
  // Data and model must outlive it.
  StepBatches(TrainData& data, const Gpt& model, const Sizes& sizes) : data_(data), model_(model), sizes_(sizes) {}
  int64_t sequences() const { return sizes_.sequences; }

  // Returns the sequences of the run from `first` on. Throws what TrainData::batch() throws, and what prefetch() met for this batch.
  StepBatch take(int64_t first);

  // Reads and checks the batch from `first` on, and asks the lane of this thread to upload it. Keeps an error for the take() of this batch,
  // so that the step before is not lost by it.
  void prefetch(int64_t first) noexcept;

 private:
  struct Prefetched {
    int64_t first = 0;
    StepBatch batch = {};
    std::exception_ptr error = {};
  };

  TrainData& data_;
  const Gpt& model_;
  Sizes sizes_;
  std::optional<Prefetched> next_;
};

// Balances experts without a loss (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3), by biases that follow from the load.

// Returns the assignments of each expert in micro batches of these figures (RouterStatistics), before any was dropped, layer by layer, as
// whole numbers. Empty for a set without expert biases.
std::vector<double> expert_assignments(const ParameterSet& parameters, std::span<const double> figures);

// Updates the biases after a step: each falls by `rate` if its expert has more assignments than the mean of its layer, and rises by it if
// fewer. `assignments` are those of all data ranks, summed.
void update_expert_biases(ParameterSet& parameters, double rate, const std::vector<double>& assignments);

// The loss is the sum over the targets that count, divided by their number; 0 without any. Seconds are those of forward and backward,
// excluding waits for other ranks; figures are those of RouterStatistics.
struct StepResult : UpdateResult {
  int64_t targets = 0;                                       // number of them, over all ranks
  int64_t padding = 0;                                       // padding among the tokens of all ranks
  std::string bad = {};                                      // why it was skipped: the first value that is not finite
  std::vector<double> cross_entropies = {};                  // if asked for: the loss without a teacher, of each micro batch of this rank
  RouterFigures routers = RouterFigures::counts_and_losses;  // kind of the figures
};

// Adds the gradients of a micro batch to those that are there. Returns its loss: the sum over its targets divided by target_count, that of
// the whole batch.
Tensor forward_and_backward(Gpt& model, const DeviceBatch& rows, int64_t target_count, RouterStatistics& routing,
                            const Teaching& teaching = {});

struct StepOptions {
  std::function<int()> vote = {};  // returns what this rank asks for, at the end of its backward passes
  RouterFigures routers = RouterFigures::counts_and_losses;
  std::vector<DeviceBatch> uploaded = {};  // the micro batches of the batch: all, or none, which are then uploaded one by one
  RoundingPosition rounding = {};          // position of the first sequence of the batch
  Teaching teaching = {};
  bool cross_entropies = false;          // measures them beside a teacher
  std::function<void()> meanwhile = {};  // called when all of the step is asked for, before the host waits for its result
};

// Splits `batch` into equal micro batches of micro_batch_size sequences. Targets are counted before the first backward pass. If a weight,
// loss or norm is not finite, nothing is updated, neither weights nor expert biases. The memory of an uploaded micro batch goes with its
// backward pass.
StepResult training_step(Gpt& model, Optimizer& optimizer, GradientAccumulator& accumulator, const Batch& batch, int64_t micro_batch_size,
                         double lr, StepOptions options = {});

}  // namespace mantissa
