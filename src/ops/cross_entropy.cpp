#include <algorithm>

#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"

namespace mantissa {
namespace {

// Rows whose logits exist at the same time.
int64_t chunk_rows(int64_t limit, int64_t padded_vocab) { return std::max<int64_t>(64, (limit / padded_vocab) / 64 * 64); }

struct Chunk {
  Tensor x, weight, targets;
  Tensor loss;  // [rows]
};

Tensor chunk_logits(const Chunk& chunk, const LossOptions& options) {
  Tensor logits = empty(chunk.x.device(), options.logits_dtype, {chunk.x.dim(0), chunk.weight.dim(0)});
  chunk.x.device().run(Gemm{.a = {chunk.x}, .b = {chunk.weight, true}, .out = logits, .accumulate = false});
  return logits;
}

void chunk_loss(const Chunk& chunk, const LossOptions& options, double scale) {
  const Tensor logits = chunk_logits(chunk, options);
  chunk.x.device().run(
      CrossEntropy{.logits = logits, .targets = chunk.targets, .loss = chunk.loss, .vocab = options.vocab, .scale = scale});
}

void chunk_loss_and_gradients(const Chunk& chunk, const LossOptions& options, double scale, const Tensor& dx, Leaf* leaf) {
  Backend& device = chunk.x.device();
  Tensor dlogits = chunk_logits(chunk, options);
  device.run(CrossEntropy{
      .logits = dlogits, .targets = chunk.targets, .loss = chunk.loss, .vocab = options.vocab, .scale = scale, .dlogits = dlogits});
  dlogits = converted(dlogits, chunk.x.dtype());
  if (dx.defined()) device.run(Gemm{.a = {dlogits}, .b = {chunk.weight}, .out = dx, .accumulate = false});
  if (!leaf) return;
  const auto [dweight, accumulate] = leaf->target();
  device.run(Gemm{.a = {dlogits, true}, .b = {chunk.x}, .out = dweight, .accumulate = accumulate});
}

Tensor mean_loss(const Tensor& losses, double scale) {
  Tensor out = empty(losses.device(), Dtype::f64, {1});
  losses.device().run(Sum{.x = losses, .out = out, .factor = scale});
  return out;
}

}  // namespace

Var cross_entropy(const Var& x, const Var& weight, const Tensor& targets, const LossOptions& options) {
  require(options.target_count > 0, "cross_entropy: no targets to average over");
  const Tensor& value = x.value();
  const int64_t rows = value.dim(0), step = chunk_rows(options.chunk_elements, weight.value().dim(0));
  const double scale = 1.0 / static_cast<double>(options.target_count);
  const bool training = recording({x, weight});
  Tensor losses = empty(value.device(), stats_dtype(value.dtype()), {rows});
  const Tensor dx = training && x.wants_gradient() ? empty_like(value) : Tensor();
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(rows, begin + step);
    const Chunk chunk{value.slice(begin, end), weight.value(), targets.slice(begin, end), losses.slice(begin, end)};
    if (training) {
      chunk_loss_and_gradients(chunk, options, scale, dx.defined() ? dx.slice(begin, end) : Tensor(), weight.leaf());
    } else {
      chunk_loss(chunk, options, scale);
    }
  }
  return record("cross_entropy", mean_loss(losses, scale), {x, weight}, [dx](const Tensor& dy) {
    require(!dy.defined(), "cross_entropy: backward must start at the loss");
    return std::vector<Tensor>{dx, {}};
  });
}

}  // namespace mantissa
