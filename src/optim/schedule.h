// Computes the learning rate as a function of the step: it has no state, so a resumed run needs none.
#pragma once

#include <cstdint>

#include "mantissa/config/run_config.h"

namespace mantissa {

// The rate of `step`, counted from 0, of a run of `steps` steps. With W = warmup_steps, D = decay_steps and low = peak * min_lr_ratio:
//
//   step < W   peak * (step + 1) / (W + 1), as nanoGPT: the first step already learns, and step W is the first at the peak
//   cosine     low + (peak - low) * (1 + cos(pi * r)) / 2, r = (step - W) / D, then low; as nanoGPT with lr_decay_iters = W + D
//   linear     peak + (low - peak) * r, then low
//   constant   peak
//   wsd        peak until the last D steps of the run, then linear down to low (Megatron's WSD)
//
// D null: cosine, linear and wsd decay from the end of the warm-up to the end of the run.
double learning_rate(const ScheduleConfig& schedule, double peak, int64_t steps, int64_t step);

}  // namespace mantissa
