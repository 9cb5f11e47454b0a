// Error statistics of what a training step quantises (precision.report_interval).
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "mantissa/metrics/events.h"
#include "mantissa/optim/optimizer.h"

namespace mantissa {

// Measures the weights, then runs `body`, one training step of the model with these parameters, and measures every input and output
// gradient that its linear operations quantise, over all micro batches. One event per module and role that is quantised, in the order of
// the parameters, over all ranks, whose call this is; of the weights of experts it also names the worst. Changes no bit of the step.
std::vector<PrecisionEvent> measure_precision(const ParameterSet& parameters, const PrecisionPlan& plan, const Optimizer& optimizer,
                                              int64_t step, const std::function<void()>& body);

// None: nothing was quantised. fp32_products is the caller's to fill in.
std::optional<PrecisionSummary> summary_of(const std::vector<PrecisionEvent>& events);

}  // namespace mantissa
