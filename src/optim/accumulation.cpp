#include "optim/accumulation.h"

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
          "training.accumulation: tree needs a power-of-two number of micro batches per step, got grad_accum ", micro_batches);
  buffers_.push_back(parameters.gradients());
  while (static_cast<int64_t>(buffers_.size()) < buffers(how, micro_batches)) buffers_.push_back(parameters.new_gradient_buffer());
}

void GradientAccumulator::accumulate(const std::function<Tensor(int64_t)>& micro_batch, Shards& shards) {
  const auto take = [&](int64_t i) {
    parameters_.device().run(Convert{.x = micro_batch(i), .out = losses_.slice(i, i + 1)});
    // A buffer is overwritten by its first contribution, so without one it would hold the gradient of an earlier step.
    for (const Parameter& parameter : parameters_.all())
      require(parameter.leaf.written || !parameter.trained(), parameter.name, " received no gradient");
  };
  if (how_ == Accumulation::running) {
    parameters_.reset_gradients();
    for (int64_t i = 0; i < micro_batches_; ++i) {
      if (i + 1 == micro_batches_) shards.send_when_ready(parameters_.gradients(), nullptr);
      take(i);
    }
    return shards.send_rest();
  }
  // Counts in binary: after micro batch i there is one partial sum per set bit of i + 1. After the last there is one; its merges are made
  // bucket by bucket, as the gradients become ready.
  size_t pending = 0;
  for (int64_t i = 0; i < micro_batches_; ++i) {
    const int merges = std::countr_one(static_cast<uint64_t>(i));
    const bool last = i + 1 == micro_batches_;
    parameters_.use_gradient_buffer(buffers_[pending++]);
    parameters_.reset_gradients();
    if (last) {
      shards.send_when_ready(buffers_[0], [this, pending, merges](int64_t begin, int64_t end) { merge(pending, merges, begin, end); });
    }
    take(i);
    if (!last) merge(pending, merges, 0, buffers_[0].elements());
    pending -= static_cast<size_t>(merges);
  }
  parameters_.use_gradient_buffer(buffers_[0]);
  shards.send_rest();
}

// Adds the last of `pending` partial sums to the one before, and so on, over a range of elements.
void GradientAccumulator::merge(size_t pending, int merges, int64_t begin, int64_t end) const {
  for (; merges > 0; --merges, --pending) {
    const Tensor left = buffers_[pending - 2].slice(begin, end), right = buffers_[pending - 1].slice(begin, end);
    left.device().run(Add{.a = left, .b = right, .out = left});
  }
}

}  // namespace mantissa
