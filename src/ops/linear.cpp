#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/linear_products.h"

namespace mantissa {
namespace {

// y [N, out] of x [N, in].
Tensor output(const LinearProducts& products, const LinearInput& x, Shape shape, const Var& bias, const Tensor& like, const Place& place) {
  const bool partial = shared(place, Split::columns);
  const Tensor y = empty(like.device(), partial ? stats_dtype(like.dtype()) : like.dtype(), shape);
  products.fprop(x, partial ? Tensor() : bias.value(), y);
  return partial ? summed(place, y, bias.value(), like.dtype()) : y;
}

// dx [N, in] of dy [N, out], and the gradient of the weight.
Tensor input_gradient(const LinearProducts& products, const LinearInput& input, const Tensor& dy, int64_t columns, const Place& place) {
  const bool partial = shared(place, Split::rows);
  const Tensor dx = empty(dy.device(), partial ? stats_dtype(dy.dtype()) : dy.dtype(), {dy.dim(0), columns});
  products.backward(input, dy, dx);
  return partial ? summed(place, dx, {}, dy.dtype()) : dx;
}

void bias_gradient(Leaf& bias, const Tensor& dy) {
  const auto [dbias, accumulate] = bias.target();
  dy.device().run(SumRows{.x = dy, .out = dbias, .accumulate = accumulate});
}

}  // namespace

Tensor linear_product(const Tensor& x, const LinearWeight& weight, Dtype out, const Recipe& recipe, const Place& place) {
  require(place.split != Split::columns, "linear_product: only shares of rows of the weight are gathered");
  require_own_rows("linear_product", place, x);
  const LinearProducts products(weight, recipe);
  Tensor y = empty(weight.device(), out, {by_tokens(place) ? place.tokens : x.dim(0), weight.shape()[0]});
  products.fprop(products.gathered_input(place, x, false), {}, y);
  return gathered_columns(place, y);
}

Var linear(const Var& x, const LinearWeight& weight, const Var& bias, const Recipe& recipe, const Place& place) {
  const LinearProducts products(weight, recipe);
  const bool gathers = by_tokens(place) && place.split == Split::rows, recorded = recording({x, weight.var(), bias});
  if (gathers) require_own_rows("linear", place, x.value());
  require(gathers || !by_tokens(place) || x.value().dim(0) == place.tokens, "linear: ", x.value().dim(0), " rows of ", place.tokens,
          " tokens");
  const LinearInput input = gathers ? products.gathered_input(place, x.value(), recorded) : products.input(x.value());
  const int64_t rows = gathers ? place.tokens : x.value().dim(0);
  Tensor y = output(products, input, {rows, weight.shape()[0]}, bias, x.value(), place);
  if (!recorded) return Var(y);
  const bool wants_dx = x.wants_gradient();
  return record("linear", y, {x, weight.var(), bias},
                [saved = SavedInput(x, input, products, gathers), products, place, wants_dx, columns = weight.shape()[1],
                 bias_leaf = bias.leaf()](const Tensor& own) {
                  const Tensor dy = shared(place, Split::columns) ? gathered_rows(place, own) : own;
                  Tensor dx;
                  if (wants_dx) {
                    dx = input_gradient(products, saved.get(products), dy, columns, place);
                  } else {
                    products.backward(saved.get(products), dy, {});
                  }
                  if (bias_leaf) bias_gradient(*bias_leaf, own);
                  return std::vector<Tensor>{dx, {}, {}};
                });
}

}  // namespace mantissa
