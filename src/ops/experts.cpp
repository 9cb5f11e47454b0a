#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/linear_products.h"

namespace mantissa {
namespace {

// x [N, in] by expert, as the products read it. Codes move where nobody reads values.
LinearInput input_of_experts(const LinearProducts& products, const Tensor& x, const Recipe& recipe, int64_t per_row, bool as_codes,
                             bool recorded) {
  const bool codes = choose_operands(recipe, GemmRole::fprop).first.is_codes() && (saves_input_codes(recipe) || !recorded);
  if (!as_codes || !codes) return products.input(std::get<Tensor>(products.to_experts(x, per_row)));
  return {.codes = std::get<QuantizedTensor>(products.to_experts(products.codes_of_tokens(OperandRole::input, x), per_row))};
}

// One number for each row of `to`: that of its choice in [N, K], 0 for none; and back.
Tensor by_row(const Tensor& weights, const Dispatch& to) {
  const Tensor out = empty(weights.device(), weights.dtype(), {to.choices.dim(0), 1});
  weights.device().run(Permute{.x = weights.view({weights.elements(), 1}), .out = out, .choices = to.choices, .per_row = 1});
  return out.view({out.dim(0)});
}
Tensor by_choice(const Tensor& rows, const Dispatch& from) {
  const int64_t choices = from.rows.elements();
  const Tensor out = empty(rows.device(), rows.dtype(), {choices, 1});
  rows.device().run(Permute{.x = rows.view({rows.dim(0), 1}), .out = out, .choices = from.rows.view({choices}), .per_row = 1});
  return out.view(from.rows.shape());
}

Tensor to_tokens(const Tensor& rows, const Dispatch& from) {
  const Tensor out = empty(rows.device(), rows.dtype(), {from.rows.dim(0), rows.dim(1)});
  rows.device().run(Unpermute{.x = rows, .rows = from.rows, .out = out});
  return out;
}

// Rows of each expert's weight in the stack.
int64_t out_of(const LinearWeight& stack, const Dispatch& to) { return stack.shape()[0] / (to.offsets.dim(0) - 1); }

}  // namespace

Var dispatched_swiglu(const Var& x, const Var& weights, const LinearWeight& gate_up, const Dispatch& to, const Recipe& recipe, Keep keep,
                      bool as_codes) {
  const LinearProducts products(gate_up, recipe, to);
  const Tensor &value = x.value(), row_weights = by_row(weights.value(), to);
  const bool recorded = recording({x, weights, gate_up.var()});
  const LinearInput input = input_of_experts(products, value, recipe, to.per_row, as_codes, recorded);
  const Tensor up = empty(value.device(), value.dtype(), {to.choices.dim(0), out_of(gate_up, to)});
  products.fprop(input, {}, up);
  const auto activation = [up, row_weights] {
    const Tensor out = empty(up.device(), up.dtype(), {up.dim(0), up.dim(1) / 2});
    up.device().run(SwiGluForward{.x = up, .out = out, .row_weights = row_weights});
    return out;
  };
  if (!recorded) return Var(activation());
  const Var out =
      record("dispatched_swiglu", activation(), {x, weights, gate_up.var()},
             [products, up, row_weights, to, kept = products.kept(input), columns = value.dim(1)](const Tensor& dy) {
               const Tensor dup = empty_like(up), drow_weights = empty_like(row_weights);
               dy.device().run(SwiGluBackward{.x = up, .dy = dy, .dx = dup, .row_weights = row_weights, .drow_weights = drow_weights});
               const Tensor dx = empty(dy.device(), dy.dtype(), {dy.dim(0), columns});
               products.backward(kept, dup, dx);
               return std::vector<Tensor>{to_tokens(dx, to), by_choice(drow_weights, to), {}};
             });
  return keep == Keep::value ? out : rebuilt_on_demand(out, activation);
}

Var combined_linear(const Var& x, const LinearWeight& down, const Dispatch& from, const Recipe& recipe) {
  const LinearProducts products(down, recipe, from);
  const Tensor& value = x.value();
  const LinearInput input = products.input(value);
  const Tensor rows = empty(value.device(), value.dtype(), {value.dim(0), out_of(down, from)});
  products.fprop(input, {}, rows);
  const Tensor y = to_tokens(rows, from);
  if (!recording({x, down.var()})) return Var(y);
  const bool codes_move = choose_operands(recipe, GemmRole::wgrad).first.source == OperandSource::shifted;
  return record("combined_linear", y, {x, down.var()},
                [products, from, codes_move, saved = SavedInput(x, input, products, false), columns = value.dim(1)](const Tensor& dy) {
                  const Tensor dx = empty(dy.device(), dy.dtype(), {from.choices.dim(0), columns});
                  const LinearInput kept = saved.get(products);
                  if (codes_move) {
                    const QuantizedTensor codes = products.codes_of_tokens(OperandRole::output_grad, dy);
                    products.backward(kept, products.gradient_of_codes(std::get<QuantizedTensor>(products.to_experts(codes, from.per_row))),
                                      dx);
                  } else {
                    products.backward(kept, std::get<Tensor>(products.to_experts(dy, from.per_row)), dx);
                  }
                  return std::vector<Tensor>{dx, {}};
                });
}

}  // namespace mantissa
