// Finds what a run takes of memory: what forward and backward of one micro batch take on a rank, by running the real model without data and
// without memory, and with it estimate_memory(). Refuses a run that its hosts or GPUs have no memory for, before any of it is allocated.
#pragma once

#include <vector>

#include "base/limits.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/plan/estimate.h"

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

// Throws Error(environment) on all ranks if the tensors of estimate_memory(), of all ranks of a host, or of a control group with a limit,
// exceed what is free there, unless training.allow_memory_overcommit. All ranks call it together.
void require_free_memory(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world,
                         const std::vector<FreeMemory>& free = free_memory());

// Like require_free_memory(), for a run whose training.device is a GPU, of which the host holds no tensors: the memory that
// free_gpu_memory() returned must hold estimate_memory() without contexts and NCCL, which have theirs already, for all ranks that use that
// GPU.
void require_free_gpu_memory(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world,
                             const std::vector<FreeMemory>& free);

// Returns what is free on the GPU that make_backend("cuda") opens in this process, beside the contexts of all ranks; nothing where there is
// no such GPU. All ranks call it together.
std::vector<FreeMemory> free_gpu_memory(const Communicator& world);

}  // namespace mantissa
