#include <algorithm>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "ops/linear.h"
#include "ops/ops.h"

namespace mantissa {
namespace {

// Computes the losses of rows of logits, whose columns the ranks may share: then each announces the sums of its own, [ranks, rows, 2], and
// all know the loss.
void loss_of_rows(const Tensor& logits, const Tensor& targets, const Tensor& losses, int64_t vocab, const TensorParallel& tp, double scale,
                  const Tensor& dlogits) {
  Backend& device = logits.device();
  if (!shared(tp)) {
    return device.run(
        CrossEntropy{.logits = logits, .targets = targets, .loss = losses, .vocab = vocab, .scale = scale, .dlogits = dlogits});
  }
  const int64_t rows = logits.dim(0), rank = tp.group.rank(), first = logits.dim(1) * rank;
  const Tensor sums = empty(device, losses.dtype(), {tp.group.size(), rows, 2}), own = sums.slice(rank, rank + 1).view({rows, 2});
  device.run(CrossEntropyShare{.logits = logits, .targets = targets, .sums = own, .first = first, .vocab = vocab});
  gather_parts(tp, sums, own.bytes());
  device.run(CrossEntropyOfShares{.logits = logits,
                                  .targets = targets,
                                  .sums = sums,
                                  .loss = losses,
                                  .first = first,
                                  .vocab = vocab,
                                  .scale = scale,
                                  .dlogits = dlogits});
}

}  // namespace

Var cross_entropy(const Var& x, const LinearWeight& weight, const Tensor& targets, const LossOptions& options,
                  const LinearOperands& operands, const TensorParallel& tp) {
  require(options.target_count > 0, "cross_entropy: no targets to average over");
  require(tp.split != Split::row_parallel, "cross_entropy: the weight must not be row-parallel");
  require_own_rows("cross_entropy", tp, x.value());
  const Tensor& value = x.value();
  const int64_t rows = targets.dim(0), columns = weight.shape()[0], grain = std::max<int64_t>(64, operands.block);
  const int64_t step = std::max(grain, options.chunk_elements / columns / grain * grain);
  const double scale = 1.0 / static_cast<double>(options.target_count);
  const bool training = recording({x, weight.var()}), wants_dx = training && x.wants_gradient();
  const LinearGemms gemms(weight, operands);
  const LinearInput input = by_tokens(tp) ? gemms.gathered_input(tp, value, training) : LinearInput{.high = value};
  Tensor losses = options.row_losses;
  if (!losses.defined()) losses = empty(value.device(), stats_dtype(value.dtype()), {rows});
  Tensor dx;
  if (wants_dx) dx = empty(value.device(), shared(tp) ? losses.dtype() : value.dtype(), {rows, value.dim(1)});
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(rows, begin + step);
    const LinearGemms part = gemms.from_token(begin);
    // Rows of what fprop reads. Without a gather they are quantized here, where only a chunk of them exists. fprop reads x and, if
    // gradients are wanted, wgrad once more; it is quantized once.
    LinearInput chunk;
    if (input.codes.defined()) {
      const int64_t whole = std::min(input.codes.dim(0), round_up(end, input.codes.how.block()));
      chunk.codes = slice(input.codes, begin, whole);
      if (input.columns.defined()) chunk.columns = slice(input.columns, begin, whole);
      if (input.high.defined()) chunk.high = input.high.slice(begin, end);
    } else {
      chunk = part.input(input.high.slice(begin, end), training);
    }
    const Tensor logits = empty(value.device(), options.logits_dtype, {end - begin, columns});
    part.fprop(chunk, {}, logits);
    loss_of_rows(logits, targets.slice(begin, end), losses.slice(begin, end), options.vocab, tp, scale, training ? logits : Tensor());
    if (!training) continue;
    part.backward(part.kept(chunk), converted(logits, value.dtype()), wants_dx ? dx.slice(begin, end) : Tensor());
  }
  if (wants_dx && shared(tp)) dx = summed(tp, dx, {}, value.dtype());
  const Tensor loss = empty(losses.device(), Dtype::f64, {1});
  losses.device().run(Sum{.x = losses, .out = loss, .factor = scale});
  return record("cross_entropy", loss, {x, weight.var()}, [dx](const Tensor& dy) {
    require(!dy.defined(), "cross_entropy: backward must start at the loss");
    return std::vector<Tensor>{dx, {}};
  });
}

}  // namespace mantissa
