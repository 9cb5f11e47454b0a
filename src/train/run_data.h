// What a run takes from its data before it starts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/data/open_data.h"
#include "mantissa/metrics/events.h"

namespace mantissa {

// Sets model.vocab_size where only the data can tell. While it reads it tells events.doing, at step 0, that it goes on. Throws what
// open_data() does, and Error(usage) if a rank has other data than rank 0.
Data open_run_data(LoadedConfig& loaded, const Communicator& world, const TrainEvents& events = {});

// Refuses what only the data shows: a vocabulary that does not fit the plan, validation without targets; and a rank with another plan.
PrecisionPlan plan_with_data(const RunConfig& config, const Data& data, const Communicator& world = {});

// The device that the run computes on. A call of all ranks; throws what require_free_memory() does where its memory is too small.
std::unique_ptr<Backend> make_device(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world);

// Prompts are encoded before the run starts, so that one that cannot be is an error then.
std::vector<std::vector<int32_t>> encode_prompts(const EvalConfig& config, const Data& data);

}  // namespace mantissa
