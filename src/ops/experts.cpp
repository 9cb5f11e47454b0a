#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/linear_gemms.h"
#include "ops/permuted_tokens.h"

namespace mantissa {
namespace {

// Returns x [N, in] as it is dispatched: as codes where no expert reads values.
Value tokens_of(const LinearGemms& gemms, const Tensor& x, const Recipe& recipe, bool as_codes, bool recorded) {
  return as_codes && dispatches_codes(recipe, recorded) ? Value(gemms.codes_of_tokens(OperandRole::input, x)) : Value(x);
}

LinearInput input_of(const LinearGemms& gemms, const Value& rows, bool recorded) {
  if (const auto* codes = std::get_if<QuantizedTensor>(&rows)) return {.codes = *codes};
  return gemms.input(std::get<Tensor>(rows), recorded);
}

// Returns the rows of each expert's weight.
int64_t out_of(const LinearWeight& weight, const Dispatch& to) { return weight.shape()[0] / (to.offsets.dim(0) - 1); }

// Adds the bias of each row's expert, which may have another compute type, to unrounded sums [R, C].
Tensor with_bias(const Tensor& sums, const Var& bias, const Dispatch& at, const Tensor& row_weights, Dtype dtype) {
  const Dtype added = bias.value().dtype() == dtype ? dtype : sums.dtype();
  const Tensor out = sums.dtype() == added ? sums : empty(sums.device(), added, sums.shape());
  const Tensor addend = converted(bias.value(), added);
  sums.device().run(AddGroupedBias{.x = sums, .bias = addend, .out = out, .offsets = at.offsets, .row_weights = row_weights});
  return converted(out, dtype);
}

void bias_gradient(Leaf& bias, const Tensor& dy, const Dispatch& at, const Tensor& row_weights) {
  const auto [dbias, accumulate] = bias.target();
  const Tensor& offsets = at.gradient_offsets.defined() ? at.gradient_offsets : at.offsets;
  dy.device().run(GroupedBiasGradient{.dy = dy, .dbias = dbias, .offsets = offsets, .accumulate = accumulate, .row_weights = row_weights});
}

// Returns the rows of dy as they arrived, as values.
Tensor values_of(const Value& dy, Dtype dtype) {
  if (const auto* values = std::get_if<Tensor>(&dy)) return *values;
  return decoded(std::get<QuantizedTensor>(dy), dtype);
}

// Computes the gradients of down's bias and, as far as they multiply that bias, of the weights of the rows.
struct DownBias {
  Tensor value{};  // undefined: there is none
  Leaf* leaf = nullptr;

  void backward(const Value& rows, Dtype dtype, const Dispatch& from) const {
    if (!value.defined()) return;
    const Tensor dy = values_of(rows, dtype), gemm = empty_like(from.weights->values);
    const Dtype read = value.dtype() == dtype ? dtype : gemm.dtype();
    dy.device().run(GroupedBiasDot{.dy = converted(dy, read), .bias = converted(value, read), .out = gemm, .offsets = from.offsets});
    from.weights->more_gradient = gemm;
    if (leaf) bias_gradient(*leaf, dy, from, from.weights->values);
  }
};

// Computes gate and up of x, before the activation.
Tensor first_gemm(const LinearGemms& gemms, const LinearInput& x, const Var& bias, const Dispatch& to, Shape shape, Dtype dtype) {
  const bool biased = bias.value().defined();
  const Tensor sums = empty(to.assignments.device(), biased ? stats_dtype(dtype) : dtype, shape);
  gemms.fprop(x, {}, sums);
  return biased ? with_bias(sums, bias, to, {}, dtype) : sums;
}

// Computes the rows of all experts, whole on each of the tensor ranks.
Tensor second_gemm(const LinearGemms& gemms, const LinearInput& x, const Var& bias, const Dispatch& from, Shape shape, Dtype dtype,
                   const TensorParallel& tp) {
  const bool biased = bias.value().defined(), partial = shared(tp, Split::row_parallel);
  const Tensor rows = empty(from.assignments.device(), partial || biased ? stats_dtype(dtype) : dtype, shape);
  gemms.fprop(x, {}, rows);
  const Tensor whole = partial ? summed(tp, rows, {}, biased ? rows.dtype() : dtype) : rows;
  return biased ? with_bias(whole, bias, from, from.weights->values, dtype) : whole;
}

}  // namespace

Var dispatched_swiglu(const Var& x, const Var& weights, const LinearWeight& gate_up, const Var& bias, const Dispatch& to,
                      const Recipe& recipe, const DispatchedOptions& options, const TensorParallel& tp) {
  const LinearGemms gemms(gate_up, recipe, to);
  const Tensor& value = x.value();
  const bool recorded = recording({x, weights, gate_up.var(), bias});
  const PermutedTokens moved = to_experts(to, tokens_of(gemms, value, recipe, options.as_codes, recorded), weights.value());
  const LinearInput input = input_of(gemms, moved.rows, recorded);
  const Tensor row_weights = moved.weights;
  to.weights->values = row_weights;
  const Tensor up = first_gemm(gemms, input, bias, to, {to.assignments.dim(0), out_of(gate_up, to)}, value.dtype());
  const auto activation = [up, row_weights, limit = options.limit] {
    const Tensor out = empty(up.device(), up.dtype(), {up.dim(0), up.dim(1) / 2});
    up.device().run(SwiGluForward{.x = up, .out = out, .row_weights = row_weights, .limit = limit});
    return out;
  };
  if (!recorded) return Var(activation());
  const Var out = record("dispatched_swiglu", activation(), {x, weights, gate_up.var(), bias},
                         [gemms, up, row_weights, to, tp, limit = options.limit, kept = gemms.kept(input), columns = value.dim(1),
                          bias_leaf = bias.leaf()](const Tensor& dy) {
                           const Tensor dup = empty_like(up), drow_weights = empty_like(row_weights);
                           dy.device().run(SwiGluBackward{
                               .x = up, .dy = dy, .dx = dup, .row_weights = row_weights, .drow_weights = drow_weights, .limit = limit});
                           const bool partial = shared(tp, Split::column_parallel);
                           const Tensor dx = empty(dy.device(), partial ? stats_dtype(dy.dtype()) : dy.dtype(), {dy.dim(0), columns});
                           gemms.backward(kept, dup, dx);
                           if (bias_leaf) bias_gradient(*bias_leaf, dup, to, {});
                           if (partial) tp.group.sum(drow_weights, Purpose::activations);
                           const Tensor of_bias = std::exchange(to.weights->more_gradient, {});
                           if (of_bias.defined()) dy.device().run(Add{.a = drow_weights, .b = of_bias, .out = drow_weights});
                           const TokenRows back = to_tokens(to, partial ? summed(tp, dx, {}, dy.dtype()) : dx, drow_weights);
                           return std::vector<Tensor>{back.sums, back.weights, {}, {}};
                         });
  return options.keep == Keep::value ? out : rebuilt_on_demand(out, activation);
}

Var combined_linear(const Var& x, const LinearWeight& down, const Var& bias, const Dispatch& from, const Recipe& recipe,
                    const TensorParallel& tp) {
  const LinearGemms gemms(down, recipe, from);
  const Tensor& value = x.value();
  const bool biased = bias.value().defined(), recorded = recording({x, down.var(), bias});
  const LinearInput input = gemms.input(value, recorded);
  require(!biased || from.weights->values.defined(), "combined_linear: a bias needs the weights that dispatched_swiglu leaves");
  const Tensor rows = second_gemm(gemms, input, bias, from, {value.dim(0), out_of(down, from)}, value.dtype(), tp);
  const Tensor y = to_tokens(from, rows).sums;
  if (!recorded) return Var(y);
  const bool codes_move = choose_operands(recipe, GemmRole::wgrad).first.source == OperandSource::requantized;
  return record("combined_linear", y, {x, down.var(), bias},
                [gemms, from, codes_move, saved = SavedInput(x, input, gemms, false), columns = value.dim(1),
                 down_bias = DownBias{bias.value(), bias.leaf()}](const Tensor& dy) {
                  const Tensor dx = empty(dy.device(), dy.dtype(), {from.assignments.dim(0), columns});
                  const LinearInput kept = saved.get(gemms);
                  const Value moving = codes_move ? Value(gemms.codes_of_tokens(OperandRole::output_grad, dy)) : Value(dy);
                  const Value arrived = to_experts(from, moving).rows;
                  down_bias.backward(arrived, dy.dtype(), from);
                  if (codes_move) {
                    gemms.backward(kept, gemms.gradient_of_codes(std::get<QuantizedTensor>(arrived)), dx);
                  } else {
                    gemms.backward(kept, std::get<Tensor>(arrived), dx);
                  }
                  return std::vector<Tensor>{dx, {}, {}};
                });
}

}  // namespace mantissa
