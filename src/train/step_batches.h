// Hands out the batches of a run, step by step. The next one can be read and uploaded while the device computes, which a host that only
// asks for kernels has time for.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

#include "mantissa/data/batch.h"
#include "mantissa/train/device_batch.h"

namespace mantissa {

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

}  // namespace mantissa
