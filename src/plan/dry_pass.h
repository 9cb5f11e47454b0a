// Finds what forward and backward of one micro batch take on a rank by running the real model without data and without memory.
#pragma once

#include "mantissa/config/run_config.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

// Bytes that a group of ranks sends.
struct Exchanges {
  int64_t bytes = 0;
  int64_t control = 0;  // beside them
  int64_t busiest = 0;  // by one rank, the larger of what it sends and receives
};

struct DryPass {
  int64_t activations = 0;  // bytes from forward to backward
  int64_t workspace = 0;    // at most beyond these
  Exchanges tensor;         // among the tensor ranks of one replica
  Exchanges experts;        // among ranks that share experts, each with a micro batch
};

// model.vocab_size must be set; `plan` is that of the config, on its ranks. Every expert gets as many rows. A micro batch of more than
// kMostTokens is not run but extrapolated from two smaller ones.
inline constexpr int64_t kMostTokens = int64_t{1} << 15;
DryPass dry_pass(const RunConfig& config, const PrecisionPlan& plan);

}  // namespace mantissa
