// Checks and prepares the data of a run before it starts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/data/open_data.h"
#include "mantissa/metrics/events.h"
#include "mantissa/train/train.h"

namespace mantissa {

// Sets model.vocab_size if only the data can define it. Reports progress by events.set_phase at step 0 while it reads. Throws what
// open_data() does, and Error(usage) if a rank has other data than rank 0.
Data open_run_data(LoadedConfig& loaded, const Communicator& world, const TrainEvents& events = {});

// Refuses what only the data shows: a vocabulary that does not fit the plan, validation without targets, and a rank with another plan.
PrecisionPlan plan_with_data(const RunConfig& config, const Data& data, const Communicator& world = {});

// Opens the device that the run computes on: what `own` makes, or that of training.device. All ranks call it together; throws what
// require_free_gpu_memory() does if the memory of the GPU of training.device is too small, and for all other devices what
// require_free_memory() does if that of the host is, whatever `own` has.
std::unique_ptr<Backend> open_run_device(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world,
                                         const MakeBackend& own);

// Encodes the prompts before the run starts, so that an invalid one is an error then.
std::vector<std::vector<int32_t>> encode_prompts(const EvalConfig& config, const Data& data);

// Returns a warning for each of these prompts that begins twice, or is longer than the model has positions.
std::vector<std::string> prompt_warnings(const RunConfig& config, const Data& data, std::span<const std::vector<int32_t>> prompts);

}  // namespace mantissa
