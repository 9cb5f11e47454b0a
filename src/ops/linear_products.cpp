#include "ops/linear_products.h"

#include <algorithm>
#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/ops/quantization_observer.h"

namespace mantissa {
namespace {

// What is quantised is always bf16, whatever the products compute in.
Tensor source_of(const Tensor& x) { return converted(x, Dtype::bf16); }

QuantizedTensor columnwise(const QuantizedTensor& rowwise) {
  QuantizedTensor out = empty_quantized(rowwise.device(), rowwise.shape, rowwise.how.transposed());
  rowwise.device().run(RequantizeColumns{.x = rowwise, .out = out});
  return out;
}

int64_t rows_of(const Value& value) { return shape_of(value)[0]; }

// Codes stand for whole blocks of tokens; the operand beside them in high precision gets zero rows to match.
Value padded(const Value& value, int64_t rows) {
  if (rows_of(value) == rows) return value;
  const Tensor& tensor = std::get<Tensor>(value);
  Tensor out = zeros(tensor.device(), tensor.dtype(), tensor.shape().with_dim0(rows));
  tensor.device().run(Convert{.x = tensor, .out = out.slice(0, tensor.dim(0))});
  return out;
}

// The gradient of the output along both contractions, in one pass where both are quantised.
struct OutputGradient {
  Value rows, columns;
};

OutputGradient output_gradient(const Tensor& dy, const Recipe& recipe, Dtype compute, bool wants_rows, bool wants_columns) {
  const Tensor high = converted(dy, compute);
  OutputGradient out{high, high};
  const OperandChoice rows = choose_operands(recipe, GemmRole::dgrad).first, columns = choose_operands(recipe, GemmRole::wgrad).first;
  if (wants_rows && rows.is_codes() && wants_columns && columns.is_codes()) {
    const Shape padded = dy.shape().with_dim0(round_up(dy.dim(0), rows.how.block()));
    QuantizedTensor row = empty_quantized(dy.device(), padded, rows.how), column = empty_quantized(dy.device(), padded, columns.how);
    dy.device().run(Quantize{.x = source_of(dy), .out = row, .second = column});
    return {slice(row, 0, dy.dim(0)), column};
  }
  if (wants_rows && rows.is_codes()) out.rows = quantized(source_of(dy), rows.how);
  if (wants_columns && columns.is_codes()) out.columns = quantized(source_of(dy), columns.how);
  return out;
}

}  // namespace

LinearInput LinearProducts::input(const Tensor& x) const {
  const OperandChoice choice = choose_operands(recipe_, GemmRole::fprop).first;
  if (!choice.is_codes()) return {.high = x};
  LinearInput out{.high = x, .codes = quantized_padded(source_of(x), choice.how)};
  if (!Tape::in_backward()) observe_quantization({.weight = weight_.leaf, .role = OperandRole::input, .x = x, .codes = out.codes});
  return out;
}

LinearInput LinearProducts::gathered_input(const Place& place, const Tensor& x, bool recorded) const {
  const OperandChoice choice = choose_operands(recipe_, GemmRole::fprop).first;
  const bool as_codes = choice.is_codes() && (keeps_codes() || !recorded);
  if (!by_tokens(place) || !as_codes) return input(gathered_rows(place, x));
  return {.codes = gathered_codes(place, x, choice.how)};
}

// Blocks of 1 x b lie within a token, so each rank quantises its own. The rows behind the last token are those of zeros, as in
// quantized_padded().
QuantizedTensor LinearProducts::gathered_codes(const Place& place, const Tensor& x, const Quantization& how) const {
  const int64_t padded = round_up(place.tokens, how.block());
  const RowRange own = share_of(place.tokens, place.group.rank(), place.group.size());
  QuantizedTensor out = empty_quantized(x.device(), {padded, x.dim(1)}, how);
  if (own.size() > 0) {
    const QuantizedTensor codes = slice(out, own.begin, own.end);
    x.device().run(Quantize{.x = source_of(x), .out = codes});
    if (!Tape::in_backward())
      observe_quantization({.weight = weight_.leaf, .role = OperandRole::input, .x = x, .codes = codes, .own_tokens = true});
  }
  if (place.tokens < padded) {
    const Tensor nothing = zeros(x.device(), Dtype::bf16, {padded - place.tokens, x.dim(1)});
    x.device().run(Quantize{.x = nothing, .out = slice(out, place.tokens, padded)});
  }
  gather_rows(place, out);
  return out;
}

LinearInput LinearProducts::kept(const LinearInput& input) const {
  return keeps_codes() ? LinearInput{.codes = input.codes} : LinearInput{.high = input.high};
}

Value LinearProducts::weight(GemmRole role) const {
  switch (choose_operands(recipe_, role).second.source) {
    case OperandSource::high: return weight_.high;
    case OperandSource::shifted: return columnwise(weight_.codes);
    case OperandSource::codes:
    case OperandSource::fake:
    case OperandSource::fake_codes: return weight_.codes;  // dequantised they are DQ(Q(w)), to the bit
  }
  fail(ExitCode::internal, "no such operand of ", gemm_name(role));
}

void LinearProducts::fprop(const LinearInput& x, const Tensor& bias, const Tensor& y) const {
  const Value a = x.codes.defined() ? Value(slice(x.codes, 0, y.dim(0))) : Value(converted(x.high, compute()));
  const bool same = y.dtype() == compute() || y.dtype() == stats_dtype(compute());
  const Tensor out = same ? y : empty(y.device(), compute(), y.shape());
  y.device().run(Gemm{.a = {a}, .b = {weight(GemmRole::fprop), true}, .out = out, .accumulate = false, .bias = bias});
  if (!same) y.device().run(Convert{.x = out, .out = y});
}

Value LinearProducts::wgrad_input(const LinearInput& x) const {
  const OperandChoice choice = choose_operands(recipe_, GemmRole::wgrad).second;
  if (!choice.is_codes()) return converted(x.high, compute());
  if (choice.source == OperandSource::shifted) return columnwise(x.codes);
  QuantizedTensor codes = quantized(source_of(x.high), choice.how);
  observe_quantization({.weight = weight_.leaf, .role = OperandRole::input, .x = x.high, .codes = codes});
  return codes;
}

void LinearProducts::wgrad(const LinearInput& x, const Value& dy) const {
  const auto [dweight, accumulate] = weight_.leaf->target();
  const Value input = wgrad_input(x);
  const int64_t rows = std::max(rows_of(dy), rows_of(input));
  dweight.device().run(Gemm{.a = {padded(dy, rows), true}, .b = {padded(input, rows)}, .out = dweight, .accumulate = accumulate});
}

void LinearProducts::backward(const LinearInput& x, const Tensor& dy, const Tensor& dx) const {
  const OutputGradient gradient = output_gradient(dy, recipe_, compute(), dx.defined(), weight_.leaf != nullptr);
  const auto* rows = std::get_if<QuantizedTensor>(&gradient.rows);
  const auto* codes = rows ? rows : std::get_if<QuantizedTensor>(&gradient.columns);
  if (codes) observe_quantization({.weight = weight_.leaf, .role = OperandRole::output_grad, .x = dy, .codes = *codes});
  if (weight_.leaf) wgrad(x, gradient.columns);
  if (!dx.defined()) return;
  const bool same = dx.dtype() == compute() || dx.dtype() == stats_dtype(compute());
  const Tensor out = same ? dx : empty(dx.device(), compute(), dx.shape());
  dx.device().run(Gemm{.a = {gradient.rows}, .b = {weight(GemmRole::dgrad)}, .out = out, .accumulate = false});
  if (!same) dx.device().run(Convert{.x = out, .out = dx});
}

}  // namespace mantissa
