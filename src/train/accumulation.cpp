#include "mantissa/train/accumulation.h"

#include <bit>

#include "mantissa/backend/functions.h"

namespace mantissa {

int64_t GradientAccumulator::buffers(Accumulation how, int64_t micro_batches) {
  return how == Accumulation::running ? 1 : static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(micro_batches)));
}

GradientAccumulator::GradientAccumulator(ParameterSet& parameters, Accumulation how, int64_t micro_batches)
    : parameters_(parameters), how_(how), micro_batches_(micro_batches), losses_(empty(parameters.device(), Dtype::f64, {micro_batches})) {
  if (how == Accumulation::running) return;
  require(std::has_single_bit(static_cast<uint64_t>(micro_batches)), ExitCode::usage,
          "training.accumulation: tree needs a power of two of micro batches per step, got grad_accum ", micro_batches);
  buffers_.push_back(parameters.gradients());
  while (static_cast<int64_t>(buffers_.size()) < buffers(how, micro_batches)) buffers_.push_back(parameters.new_gradient_buffer());
}

void GradientAccumulator::accumulate(const std::function<Tensor(int64_t)>& micro_batch) {
  if (how_ == Accumulation::tree) return tree(micro_batch);
  parameters_.reset_gradients();
  for (int64_t i = 0; i < micro_batches_; ++i) take(micro_batch, i);
}

void GradientAccumulator::take(const std::function<Tensor(int64_t)>& micro_batch, int64_t i) {
  parameters_.device().run(Convert{.x = micro_batch(i), .out = losses_.slice(i, i + 1)});
  // A buffer is overwritten by its first contribution, so without one it would hold the gradient of an earlier step.
  for (const Parameter& parameter : parameters_.all()) require(parameter.leaf.written, parameter.name, " received no gradient");
}

// A binary counter: after micro batch i there is one partial sum per set bit of i + 1.
void GradientAccumulator::tree(const std::function<Tensor(int64_t)>& micro_batch) {
  size_t pending = 0;
  for (int64_t i = 0; i < micro_batches_; ++i) {
    parameters_.use_gradient_buffer(buffers_[pending]);
    parameters_.reset_gradients();
    take(micro_batch, i);
    ++pending;
    for (int merges = std::countr_one(static_cast<uint64_t>(i)); merges > 0; --merges, --pending) {
      const Tensor &left = buffers_[pending - 2], &right = buffers_[pending - 1];
      left.device().run(Add{.a = left, .b = right, .out = left});
    }
  }
  parameters_.use_gradient_buffer(buffers_[0]);
}

}  // namespace mantissa
