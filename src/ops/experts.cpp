#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/expert_rows.h"
#include "ops/linear_products.h"

namespace mantissa {
namespace {

// x [N, in] as it moves to the experts: codes where nobody there reads values.
Value tokens_of(const LinearProducts& products, const Tensor& x, const Recipe& recipe, bool as_codes, bool recorded) {
  const bool codes = choose_operands(recipe, GemmRole::fprop).first.is_codes() && (saves_input_codes(recipe) || !recorded);
  return as_codes && codes ? Value(products.codes_of_tokens(OperandRole::input, x)) : Value(x);
}

LinearInput input_of(const LinearProducts& products, const Value& rows) {
  if (const auto* codes = std::get_if<QuantizedTensor>(&rows)) return {.codes = *codes};
  return products.input(std::get<Tensor>(rows));
}

// Rows of each expert's weight in the stack.
int64_t out_of(const LinearWeight& stack, const Dispatch& to) { return stack.shape()[0] / (to.offsets.dim(0) - 1); }

}  // namespace

Var dispatched_swiglu(const Var& x, const Var& weights, const LinearWeight& gate_up, const Dispatch& to, const Recipe& recipe, Keep keep,
                      bool as_codes, const Place& place) {
  const LinearProducts products(gate_up, recipe, to);
  const Tensor& value = x.value();
  const bool recorded = recording({x, weights, gate_up.var()});
  const ExpertRows moved = to_experts(to, tokens_of(products, value, recipe, as_codes, recorded), weights.value());
  const LinearInput input = input_of(products, moved.rows);
  const Tensor row_weights = moved.weights;
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
             [products, up, row_weights, to, place, kept = products.kept(input), columns = value.dim(1)](const Tensor& dy) {
               const Tensor dup = empty_like(up), drow_weights = empty_like(row_weights);
               dy.device().run(SwiGluBackward{.x = up, .dy = dy, .dx = dup, .row_weights = row_weights, .drow_weights = drow_weights});
               const bool partial = shared(place, Split::rows);
               const Tensor dx = empty(dy.device(), partial ? stats_dtype(dy.dtype()) : dy.dtype(), {dy.dim(0), columns});
               products.backward(kept, dup, dx);
               if (partial) place.group.sum(drow_weights, Purpose::activations);
               const TokenRows back = to_tokens(to, partial ? summed(place, dx, {}, dy.dtype()) : dx, drow_weights);
               return std::vector<Tensor>{back.sums, back.weights, {}};
             });
  return keep == Keep::value ? out : rebuilt_on_demand(out, activation);
}

Var combined_linear(const Var& x, const LinearWeight& down, const Dispatch& from, const Recipe& recipe, const Place& place) {
  const LinearProducts products(down, recipe, from);
  const Tensor& value = x.value();
  const LinearInput input = products.input(value);
  const bool partial = shared(place, Split::columns);
  const Tensor rows = empty(value.device(), partial ? stats_dtype(value.dtype()) : value.dtype(), {value.dim(0), out_of(down, from)});
  products.fprop(input, {}, rows);
  const Tensor y = to_tokens(from, partial ? summed(place, rows, {}, value.dtype()) : rows).sums;
  if (!recording({x, down.var()})) return Var(y);
  const bool codes_move = choose_operands(recipe, GemmRole::wgrad).first.source == OperandSource::shifted;
  return record("combined_linear", y, {x, down.var()},
                [products, from, codes_move, saved = SavedInput(x, input, products, false), columns = value.dim(1)](const Tensor& dy) {
                  const Tensor dx = empty(dy.device(), dy.dtype(), {from.choices.dim(0), columns});
                  const LinearInput kept = saved.get(products);
                  if (codes_move) {
                    const ExpertRows codes = to_experts(from, products.codes_of_tokens(OperandRole::output_grad, dy));
                    products.backward(kept, products.gradient_of_codes(std::get<QuantizedTensor>(codes.rows)), dx);
                  } else {
                    products.backward(kept, std::get<Tensor>(to_experts(from, dy).rows), dx);
                  }
                  return std::vector<Tensor>{dx, {}};
                });
}

}  // namespace mantissa
