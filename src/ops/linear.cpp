#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/linear_gemms.h"

namespace mantissa {
namespace {

// Computes y [N, out] of x [N, in].
Tensor output(const LinearGemms& gemms, const LinearInput& x, Shape shape, const Var& bias, const Tensor& like, const TensorParallel& tp) {
  const bool partial = shared(tp, Split::row_parallel);
  const Tensor y = empty(like.device(), partial ? stats_dtype(like.dtype()) : like.dtype(), shape);
  gemms.fprop(x, partial ? Tensor() : bias.value(), y);
  return partial ? summed(tp, y, bias.value(), like.dtype()) : y;
}

// Computes dx [N, in] of dy [N, out], and the gradient of the weight.
Tensor input_gradient(const LinearGemms& gemms, const LinearInput& input, const Tensor& dy, int64_t columns, const TensorParallel& tp) {
  const bool partial = shared(tp, Split::column_parallel);
  const Tensor dx = empty(dy.device(), partial ? stats_dtype(dy.dtype()) : dy.dtype(), {dy.dim(0), columns});
  gemms.backward(input, dy, dx);
  return partial ? summed(tp, dx, {}, dy.dtype()) : dx;
}

void bias_gradient(Leaf& bias, const Tensor& dy) {
  const auto [dbias, accumulate] = bias.target();
  dy.device().run(SumRows{.x = dy, .out = dbias, .accumulate = accumulate});
}

}  // namespace

Tensor linear_fprop(const Tensor& x, const LinearWeight& weight, Dtype out, const Recipe& recipe, const TensorParallel& tp) {
  require(tp.split != Split::row_parallel, "linear_fprop: only shares of rows of the weight are gathered");
  require_own_rows("linear_fprop", tp, x);
  const LinearGemms gemms(weight, recipe);
  Tensor y = empty(weight.device(), out, {by_tokens(tp) ? tp.tokens : x.dim(0), weight.shape()[0]});
  gemms.fprop(gemms.gathered_input(tp, x, false), {}, y);
  return gathered_columns(tp, y);
}

Var linear(const Var& x, const LinearWeight& weight, const Var& bias, const Recipe& recipe, const TensorParallel& tp) {
  const LinearGemms gemms(weight, recipe);
  const bool gathers = by_tokens(tp) && tp.split == Split::column_parallel, recorded = recording({x, weight.var(), bias});
  if (gathers) require_own_rows("linear", tp, x.value());
  require(gathers || !by_tokens(tp) || x.value().dim(0) == tp.tokens, "linear: ", x.value().dim(0), " rows of ", tp.tokens, " tokens");
  const LinearInput input = gathers ? gemms.gathered_input(tp, x.value(), recorded) : gemms.input(x.value(), recorded);
  const int64_t rows = gathers ? tp.tokens : x.value().dim(0);
  Tensor y = output(gemms, input, {rows, weight.shape()[0]}, bias, x.value(), tp);
  if (!recorded) return Var(y);
  const bool wants_dx = x.wants_gradient();
  return record("linear", y, {x, weight.var(), bias},
                [saved = SavedInput(x, input, gemms, gathers), gemms, tp, wants_dx, columns = weight.shape()[1],
                 bias_leaf = bias.leaf()](const Tensor& own) {
                  const Tensor dy = shared(tp, Split::row_parallel) ? gathered_rows(tp, own) : own;
                  Tensor dx;
                  if (wants_dx) {
                    dx = input_gradient(gemms, saved.get(gemms), dy, columns, tp);
                  } else {
                    gemms.backward(saved.get(gemms), dy, {});
                  }
                  if (bias_leaf) bias_gradient(*bias_leaf, own);
                  return std::vector<Tensor>{dx, {}, {}};
                });
}

}  // namespace mantissa
