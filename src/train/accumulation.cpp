#include "mantissa/train/accumulation.h"

#include <bit>

namespace mantissa {

int64_t GradientAccumulator::buffers(Accumulation how, int64_t micro_batches) {
  return how == Accumulation::running ? 1 : static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(micro_batches)));
}

GradientAccumulator::GradientAccumulator(ParameterSet& parameters, Accumulation how, int64_t micro_batches)
    : parameters_(parameters), how_(how), micro_batches_(micro_batches) {
  if (how == Accumulation::running) return;
  require(std::has_single_bit(static_cast<uint64_t>(micro_batches)), ExitCode::usage,
          "training.accumulation: tree needs a power of two of micro batches per step, got grad_accum ", micro_batches);
  buffers_.push_back(parameters.gradients());
  while (static_cast<int64_t>(buffers_.size()) < buffers(how, micro_batches)) buffers_.push_back(parameters.new_gradient_buffer());
  losses_.resize(buffers_.size());
}

double GradientAccumulator::accumulate(const std::function<double(int64_t)>& micro_batch) {
  return how_ == Accumulation::running ? running(micro_batch) : tree(micro_batch);
}

double GradientAccumulator::running(const std::function<double(int64_t)>& micro_batch) {
  parameters_.reset_gradients();
  double loss = 0.0;
  for (int64_t i = 0; i < micro_batches_; ++i) loss += micro_batch(i);
  require_all_written();
  return loss;
}

// A binary counter: after micro batch i there is one partial sum per set bit of i + 1.
double GradientAccumulator::tree(const std::function<double(int64_t)>& micro_batch) {
  size_t pending = 0;
  for (int64_t i = 0; i < micro_batches_; ++i) {
    parameters_.use_gradient_buffer(buffers_[pending]);
    parameters_.reset_gradients();
    losses_[pending] = micro_batch(i);
    require_all_written();
    ++pending;
    for (int merges = std::countr_one(static_cast<uint64_t>(i)); merges > 0; --merges, --pending) {
      const Tensor &left = buffers_[pending - 2], &right = buffers_[pending - 1];
      left.device().run(Add{.a = left, .b = right, .out = left});
      losses_[pending - 2] += losses_[pending - 1];
    }
  }
  parameters_.use_gradient_buffer(buffers_[0]);
  return losses_[0];
}

// A buffer is overwritten by its first contribution, so without one it would hold the gradient of an earlier step.
void GradientAccumulator::require_all_written() const {
  for (const Parameter& parameter : parameters_.all()) require(parameter.leaf.written, parameter.name, " received no gradient");
}

}  // namespace mantissa
