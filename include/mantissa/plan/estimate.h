// Estimates what a run will need, before it starts.
#pragma once

#include <cstdint>

#include "mantissa/config/run_config.h"

namespace mantissa {

// Bytes of the rank that needs most, by purpose; each at most 1e18. Between steps the first four and the exchange are allocated: exactly,
// except for scalars and sums of a few kilobytes. Experts are assumed to be chosen evenly; otherwise activations take more.
struct MemoryEstimate {
  int64_t masters = 0;      // fp32 weights: the own ones, and those of others where forward reads them
  int64_t values = 0;       // beside the masters: copies in the compute dtype (fp32: the masters), codes and scales; buffers
  int64_t gradients = 0;    // fp32, as many buffers as training.accumulation needs
  int64_t optimizer = 0;    // two moments of the own weights
  int64_t activations = 0;  // kept between forward and backward of one micro batch, for training.recompute
  int64_t workspace = 0;    // at most beyond these in forward and backward, with GEMMs as this CPU computes them
  int64_t exchange = 0;     // what comes from other ranks of the gradients of a bucket
  int64_t program = 0;      // beside tensors: code, libraries, generated kernels, stacks and, with several ranks, transport; measured
  int64_t tensors() const { return masters + values + gradients + optimizer + activations + workspace + exchange; }
  int64_t total() const { return tensors() + program; }
};

// model.vocab_size must be set; `plan` is that of the config, on parallel.data ranks.
MemoryEstimate estimate_memory(const RunConfig& config, const PrecisionPlan& plan);

}  // namespace mantissa
