// Refuses a run that its hosts or GPUs have no memory for, before any of it is allocated.
#pragma once

#include <vector>

#include "base/limits.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

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
