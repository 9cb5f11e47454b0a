#include <algorithm>

#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/linear_products.h"

namespace mantissa {
namespace {

// Rows whose logits exist at the same time.
int64_t chunk_rows(int64_t limit, int64_t padded_vocab) { return std::max<int64_t>(64, (limit / padded_vocab) / 64 * 64); }

struct Chunk {
  Tensor x, targets;
  Tensor loss;  // [rows]
};

// x is read by fprop and, if gradients are wanted, once more by wgrad: quantised once.
struct ChunkLogits {
  LinearInput input;
  Tensor logits;
};

ChunkLogits chunk_logits(const Chunk& chunk, const LinearProducts& products, int64_t columns, const LossOptions& options) {
  ChunkLogits out{products.input(chunk.x), empty(chunk.x.device(), options.logits_dtype, {chunk.x.dim(0), columns})};
  products.fprop(out.input, {}, out.logits);
  return out;
}

void chunk_loss(const Chunk& chunk, const Tensor& logits, const LossOptions& options, double scale, const Tensor& dlogits) {
  chunk.x.device().run(CrossEntropy{
      .logits = logits, .targets = chunk.targets, .loss = chunk.loss, .vocab = options.vocab, .scale = scale, .dlogits = dlogits});
}

Tensor mean_loss(const Tensor& losses, double scale) {
  Tensor out = empty(losses.device(), Dtype::f64, {1});
  losses.device().run(Sum{.x = losses, .out = out, .factor = scale});
  return out;
}

}  // namespace

Var cross_entropy(const Var& x, const LinearWeight& weight, const Tensor& targets, const LossOptions& options, const Recipe& recipe) {
  require(options.target_count > 0, "cross_entropy: no targets to average over");
  const Tensor& value = x.value();
  const int64_t rows = value.dim(0), columns = weight.shape()[0], step = chunk_rows(options.chunk_elements, columns);
  const double scale = 1.0 / static_cast<double>(options.target_count);
  const bool training = recording({x, weight.var()});
  const LinearProducts products(weight, recipe);
  Tensor losses = empty(value.device(), stats_dtype(value.dtype()), {rows});
  const Tensor dx = training && x.wants_gradient() ? empty_like(value) : Tensor();
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(rows, begin + step);
    const Chunk chunk{value.slice(begin, end), targets.slice(begin, end), losses.slice(begin, end)};
    const auto [input, logits] = chunk_logits(chunk, products, columns, options);
    chunk_loss(chunk, logits, options, scale, training ? logits : Tensor());
    if (!training) continue;
    products.backward(products.kept(input), converted(logits, value.dtype()), dx.defined() ? dx.slice(begin, end) : Tensor());
  }
  return record("cross_entropy", mean_loss(losses, scale), {x, weight.var()}, [dx](const Tensor& dy) {
    require(!dy.defined(), "cross_entropy: backward must start at the loss");
    return std::vector<Tensor>{dx, {}};
  });
}

}  // namespace mantissa
