// Sums gradients over the micro batches of a step.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "mantissa/config/run_config.h"
#include "nn/shards.h"

namespace mantissa {

// running: adds each micro batch to one buffer. tree: adds neighbors in pairs, then pairs of pairs, so that any power-of-two group of ranks
// that owns an aligned range of the micro batches computes the same sums; it needs log2(M) + 1 buffers.
class GradientAccumulator {
 public:
  // Throws Error(usage) for tree if the number of micro batches is no power of two.
  GradientAccumulator(ParameterSet& parameters, Accumulation how, int64_t micro_batches);

  // Calls micro_batch(i) for i = 0 .. M-1; each runs forward and backward and returns its share of the loss, one fp64. Afterwards the
  // gradients of the set hold the sum, which the last backward pass is sending to the owners of its shards, and losses() [M] holds all
  // shares.
  void accumulate(const std::function<Tensor(int64_t)>& micro_batch, Shards& shards);
  const Tensor& losses() const { return losses_; }
  bool pairwise() const { return how_ == Accumulation::tree; }  // the order in which losses are to be summed, as the gradients were

  // Returns how many buffers of that many gradients it needs.
  static int64_t buffers(Accumulation how, int64_t micro_batches);

 private:
  void merge(size_t pending, int merges, int64_t begin, int64_t end) const;

  ParameterSet& parameters_;
  Accumulation how_;
  int64_t micro_batches_;
  std::vector<Tensor> buffers_;  // tree: partial sums, the widest range first
  Tensor losses_;
};

}  // namespace mantissa
