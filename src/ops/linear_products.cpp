#include "ops/linear_products.h"

#include <algorithm>
#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

// What is quantised is always bf16, whatever the products compute in.
Tensor source_of(const Tensor& x) { return converted(x, Dtype::bf16); }

QuantizedTensor columnwise(const QuantizedTensor& rowwise) {
  QuantizedTensor out = empty_quantized(rowwise.device(), rowwise.shape, rowwise.how.transposed());
  rowwise.device().run(RequantizeColumns{.x = rowwise, .out = out});
  return out;
}

// Of all choices that were not dropped, by token.
Tensor rows_of_choices(const Dispatch& groups) {
  std::vector<int32_t> rows = to_host<int32_t>(groups.rows);
  std::erase(rows, -1);
  return from_host(groups.rows.device(), Dtype::i32, {static_cast<int64_t>(rows.size())}, rows.data());
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

// In one pass where both are quantised.
OutputGradient output_gradient(const Tensor& dy, const Recipe& recipe, Dtype compute, bool wants_rows, bool wants_columns) {
  const Tensor high = converted(dy, compute);
  OutputGradient out{high, high};
  const OperandChoice rows = choose_operands(recipe, GemmRole::dgrad).first, columns = choose_operands(recipe, GemmRole::wgrad).first;
  require(columns.source != OperandSource::shifted, "output gradients that are shifted come as codes");
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
  if (!Tape::in_backward()) observe(OperandRole::input, x, out.codes);
  return out;
}

// Rows of a dispatch are shown in the order of tokens, without those of padding, and columnwise codes, which go across these, not at all.
void LinearProducts::observe(OperandRole role, const Tensor& x, const QuantizedTensor& codes) const {
  const auto show = [&](const Tensor& of, const QuantizedTensor& are) {
    observe_quantization({.weight = weight_.leaf, .role = role, .x = of, .codes = are});
  };
  if (!groups_.offsets.defined()) return show(x, codes);
  if (!observing_quantization() || !codes.how.rowwise()) return;
  const Tensor rows = rows_of_choices(groups_);
  const Tensor values = empty(x.device(), x.dtype(), x.shape().with_dim0(rows.dim(0)));
  const QuantizedTensor compact = empty_quantized(x.device(), values.shape(), codes.how);
  x.device().run(Permute{.x = x, .out = values, .choices = rows, .per_row = 1});
  x.device().run(Permute{.x = codes, .out = compact, .choices = rows, .per_row = 1});
  show(values, compact);
}

QuantizedTensor LinearProducts::codes_of_tokens(OperandRole role, const Tensor& x) const {
  const GemmRole product = role == OperandRole::input ? GemmRole::fprop : GemmRole::dgrad;
  QuantizedTensor codes = quantized(source_of(x), choose_operands(recipe_, product).first.how);
  const bool again = role == OperandRole::input && Tape::in_backward();
  if (!again) observe_quantization({.weight = weight_.leaf, .role = role, .x = x, .codes = codes});
  return codes;
}

OutputGradient LinearProducts::gradient_of_codes(const QuantizedTensor& rows) const { return {rows, columnwise(rows)}; }

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

void LinearProducts::multiply(const Value& a, GemmRole role, const Tensor& out, const Tensor& bias) const {
  const Operand b{.value = weight(role), .transposed = role == GemmRole::fprop};
  const bool same = out.dtype() == compute() || out.dtype() == stats_dtype(compute());
  const Tensor product = same ? out : empty(out.device(), compute(), out.shape());
  if (groups_.offsets.defined()) {
    require(!bias.defined(), "products of experts have no bias");
    out.device().run(GroupedGemm{.a = {a}, .b = b, .out = product, .offsets = groups_.offsets});
  } else {
    out.device().run(Gemm{.a = {a}, .b = b, .out = product, .accumulate = false, .bias = bias});
  }
  if (!same) out.device().run(Convert{.x = product, .out = out});
}

void LinearProducts::fprop(const LinearInput& x, const Tensor& bias, const Tensor& y) const {
  const Value a = x.codes.defined() ? Value(slice(x.codes, 0, y.dim(0))) : Value(converted(x.high, compute()));
  multiply(a, GemmRole::fprop, y, bias);
}

Value LinearProducts::wgrad_input(const LinearInput& x) const {
  const OperandChoice choice = choose_operands(recipe_, GemmRole::wgrad).second;
  if (!choice.is_codes()) return converted(x.high, compute());
  if (choice.source == OperandSource::shifted) return columnwise(x.codes);
  QuantizedTensor codes = quantized(source_of(x.high), choice.how);
  observe(OperandRole::input, x.high, codes);
  return codes;
}

void LinearProducts::wgrad(const LinearInput& x, const Value& dy) const {
  const auto [dweight, accumulate] = weight_.leaf->target();
  const Value input = wgrad_input(x);
  if (groups_.offsets.defined()) {
    const Tensor& offsets = groups_.gradient_offsets.defined() ? groups_.gradient_offsets : groups_.offsets;
    return dweight.device().run(GroupedWeightGradient{.a = dy, .b = input, .out = dweight, .offsets = offsets, .accumulate = accumulate});
  }
  const int64_t rows = std::max(rows_of(dy), rows_of(input));
  dweight.device().run(Gemm{.a = {padded(dy, rows), true}, .b = {padded(input, rows)}, .out = dweight, .accumulate = accumulate});
}

void LinearProducts::backward(const LinearInput& x, const Tensor& dy, const Tensor& dx) const {
  const OutputGradient gradient = output_gradient(dy, recipe_, compute(), dx.defined(), weight_.leaf != nullptr);
  const auto* rows = std::get_if<QuantizedTensor>(&gradient.rows);
  const auto* codes = rows ? rows : std::get_if<QuantizedTensor>(&gradient.columns);
  if (codes) observe(OperandRole::output_grad, dy, *codes);
  backward(x, gradient, dx);
}

void LinearProducts::backward(const LinearInput& x, const OutputGradient& dy, const Tensor& dx) const {
  if (weight_.leaf) wgrad(x, dy.columns);
  if (dx.defined()) multiply(dy.rows, GemmRole::dgrad, dx, {});
}

}  // namespace mantissa
