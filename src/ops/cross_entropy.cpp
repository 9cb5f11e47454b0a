#include <algorithm>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "ops/linear.h"
#include "ops/ops.h"

namespace mantissa {
namespace {

struct Chunk {
  LinearInput x;
  Tensor targets;
  Tensor loss;  // [rows]
};

// Returns rows [begin, end) of what fprop reads. Without a gather they are quantized here, where only a chunk of them exists. fprop reads x
// and, if gradients are wanted, wgrad once more; it is quantized once.
LinearInput chunk_input(const LinearInput& all, const LinearGemms& gemms, int64_t begin, int64_t end, bool recorded) {
  if (!all.codes.defined()) return gemms.input(all.high.slice(begin, end), recorded);
  const int64_t whole = std::min(all.codes.dim(0), round_up(end, all.codes.how.block()));
  LinearInput out{.codes = slice(all.codes, begin, whole)};
  if (all.columns.defined()) out.columns = slice(all.columns, begin, whole);
  if (all.high.defined()) out.high = all.high.slice(begin, end);
  return out;
}

// Returns the sums that each rank announces of its own columns, [ranks, rows, 2].
Tensor sums_of_ranks(const Chunk& chunk, const Tensor& logits, const LossOptions& options, const TensorParallel& tp) {
  const int64_t rows = logits.dim(0), first = logits.dim(1) * tp.group.rank(), rank = tp.group.rank(), ranks = tp.group.size();
  Backend& device = logits.device();
  const Tensor sums = empty(device, chunk.loss.dtype(), {ranks, rows, 2}), own = sums.slice(rank, rank + 1).view({rows, 2});
  device.run(CrossEntropyShare{.logits = logits, .targets = chunk.targets, .sums = own, .first = first, .vocab = options.vocab});
  gather_parts(tp, sums, own.bytes());
  return sums;
}

// Computes the loss of columns that the ranks share: each announces the sums of its own, then all know the loss.
void shared_loss(const Chunk& chunk, const Tensor& logits, const LossOptions& options, const TensorParallel& tp, double scale,
                 const Tensor& dlogits) {
  const Tensor sums = sums_of_ranks(chunk, logits, options, tp);
  logits.device().run(CrossEntropyOfShares{.logits = logits,
                                           .targets = chunk.targets,
                                           .sums = sums,
                                           .loss = chunk.loss,
                                           .first = logits.dim(1) * tp.group.rank(),
                                           .vocab = options.vocab,
                                           .scale = scale,
                                           .dlogits = dlogits});
}

void chunk_loss(const Chunk& chunk, const Tensor& logits, const LossOptions& options, const TensorParallel& tp, double scale,
                const Tensor& dlogits) {
  if (shared(tp)) return shared_loss(chunk, logits, options, tp, scale, dlogits);
  logits.device().run(CrossEntropy{
      .logits = logits, .targets = chunk.targets, .loss = chunk.loss, .vocab = options.vocab, .scale = scale, .dlogits = dlogits});
}

Tensor mean_loss(const Tensor& losses, double scale) {
  Tensor out = empty(losses.device(), Dtype::f64, {1});
  losses.device().run(Sum{.x = losses, .out = out, .factor = scale});
  return out;
}

}  // namespace

int64_t chunk_rows(int64_t columns, const Recipe& recipe, int64_t elements) {
  const int64_t grain = std::max<int64_t>(64, recipe.block());
  return std::max(grain, (elements / columns) / grain * grain);
}

Var cross_entropy(const Var& x, const LinearWeight& weight, const Tensor& targets, const LossOptions& options, const Recipe& recipe,
                  const TensorParallel& tp) {
  require(options.target_count > 0, "cross_entropy: no targets to average over");
  require(tp.split != Split::row_parallel, "cross_entropy: only shares of rows of the weight have logits");
  require_own_rows("cross_entropy", tp, x.value());
  const Tensor& value = x.value();
  const int64_t rows = targets.dim(0), columns = weight.shape()[0], step = chunk_rows(columns, recipe, options.chunk_elements);
  const double scale = 1.0 / static_cast<double>(options.target_count);
  const bool training = recording({x, weight.var()}), wants_dx = training && x.wants_gradient();
  const LinearGemms gemms(weight, recipe);
  const LinearInput input = by_tokens(tp) ? gemms.gathered_input(tp, value, training) : LinearInput{.high = value};
  const bool asked = options.row_losses.defined();
  const Tensor losses = asked ? options.row_losses : empty(value.device(), stats_dtype(value.dtype()), {rows});
  Tensor dx;
  if (wants_dx) dx = empty(value.device(), shared(tp) ? losses.dtype() : value.dtype(), {rows, value.dim(1)});
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(rows, begin + step);
    const LinearGemms part = gemms.from_token(begin);
    const Chunk chunk{chunk_input(input, part, begin, end, training), targets.slice(begin, end), losses.slice(begin, end)};
    const Tensor logits = empty(value.device(), options.logits_dtype, {end - begin, columns});
    part.fprop(chunk.x, {}, logits);
    chunk_loss(chunk, logits, options, tp, scale, training ? logits : Tensor());
    if (!training) continue;
    part.backward(part.kept(chunk.x), converted(logits, value.dtype()), wants_dx ? dx.slice(begin, end) : Tensor());
  }
  if (wants_dx && shared(tp)) dx = summed(tp, dx, {}, value.dtype());
  return record("cross_entropy", mean_loss(losses, scale), {x, weight.var()}, [dx](const Tensor& dy) {
    require(!dy.defined(), "cross_entropy: backward must start at the loss");
    return std::vector<Tensor>{dx, {}};
  });
}

}  // namespace mantissa
