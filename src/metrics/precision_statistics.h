// Measures the quantization error of a training step (precision.report_interval).
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "mantissa/metrics/events.h"
#include "optim/optimizer.h"

namespace mantissa {

// Measures the weights, then runs `body`, one training step of the model with these parameters, and measures every input and output
// gradient that its linear operations quantize, over all micro batches. Returns one event per quantized module and role, in the order of
// the parameters, over all ranks, which call it together; for expert weights it also names the worst. Changes no bit of the step.
std::vector<PrecisionEvent> measure_precision(const ParameterSet& parameters, const PrecisionPlan& plan, const Optimizer& optimizer,
                                              int64_t step, const std::function<void()>& body);

// Returns nothing if nothing was quantized. The caller fills in fp32_gemms.
std::optional<PrecisionSummary> summary_of(const std::vector<PrecisionEvent>& events);

}  // namespace mantissa
