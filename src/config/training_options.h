// Says how a run trains its model.
#pragma once

#include <memory>

#include "comm/mesh.h"
#include "config/open_device.h"
#include "mantissa/config/run_config.h"
#include "models/gpt.h"

namespace mantissa {

// Elements of logits that training on a GPU has at a time, 1 GiB in fp32: every chunk of rows reads and writes the gradient of the output
// projection once more.
inline constexpr int64_t kLogitsOfGpu = int64_t{1} << 28;

// Returns the options with which the ranks of a mesh train the model of a config.
inline GptOptions training_options(const RunConfig& config, const Mesh& mesh) {
  return {.recompute = config.training.recompute,
          .mesh = mesh,
          .micro_batches = *config.training.grad_accum * mesh.data.size(),
          .attention = config.training.attention,
          .quantized_dispatch = config.precision.quantized_dispatch,
          .expert_gradients = config.training.expert_gradients(),
          .logits_at_a_time = backend_name(config.training.device) == "cuda" ? kLogitsOfGpu : kLogitsAtATime};
}

// Makes the model of training.teacher, without its weights, on the ranks of the run; none: null. Throws what teacher_config() does.
inline std::unique_ptr<Gpt> make_teacher(const RunConfig& config, Backend& device, const Mesh& mesh) {
  if (!config.teacher) return nullptr;
  const RunConfig teacher = teacher_config(config);
  return std::make_unique<Gpt>(teacher.model, device, resolve_plan(teacher),
                               GptOptions{.gradients = false, .mesh = mesh, .attention = config.training.attention});
}

// Says how the model of a run learns from that teacher, which may be null.
inline Teaching teaching(const RunConfig& config, Gpt* teacher) {
  return {.teacher = teacher, .share = config.training.teacher_weight, .temperature = config.training.teacher_temperature};
}

}  // namespace mantissa
