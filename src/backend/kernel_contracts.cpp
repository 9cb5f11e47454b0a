// Contracts of more than a few lines: of kernels on packed heads, and of those that take quantized tensors.
#include <algorithm>
#include <cstdlib>

#include "backend/dry_backend.h"
#include "mantissa/backend/backend.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/nvfp4.h"
#include "mantissa/formats/swizzle.h"

namespace mantissa {
namespace {

void allowed(Contract& c, const Quantization& how, Dtype input) {
  const bool two_levels = how.format == Format::nvfp4, one_form = how.block_rows == 1 && how.block_cols == kNvfp4Block;
  const bool known = two_levels ? how.rule == ScaleRule::nearest || how.rule == ScaleRule::mse : how.rule != ScaleRule::nearest;
  c.that(known, "nvfp4 has the rules nearest and mse, and others have no nearest: ", how);
  c.that(!two_levels || (one_form && how.range == ScaleRange{}), "nvfp4 has blocks of 1x16 and no range of scales, not ", how);
  c.that(two_levels ? std::abs(how.tensor_exponent) <= kMostTensorExponent : how.tensor_exponent == 0, "the scale of the tensor is 2^",
         int{how.tensor_exponent}, " of ", how, ": nvfp4 has 2^-60 to 2^60, and other formats none");
  c.that(how.range.least <= 127 && how.range.most >= 127 && how.range.most < 255,
         "the range of scales must contain 127 and end below 255, got ", int{how.range.least}, " to ", int{how.range.most});
  c.that(how.rule != ScaleRule::flashinfer || how.range == ScaleRange{}, "the rule flashinfer needs the whole range of scales");
  c.that(how.rule != ScaleRule::flashinfer || (how.format == Format::e2m1 && input == Dtype::bf16),
         "the rule flashinfer quantizes bf16 to e2m1, not ", input, " to ", how);
}

void matrix(Contract& c, const char* name, const Value& value, const char* spec) {
  const auto* codes = std::get_if<QuantizedTensor>(&value);
  codes ? c.input(name, *codes) : c.input(name, std::get<Tensor>(value), spec);
}

void sequences(Contract& c) {
  c.that(c.size('S') > 0 && c.size('N') % c.size('S') == 0, "counts has ", c.size('S'), " sequences, which do not divide ", c.size('N'),
         " tokens");
}

// [B] is a bias of C channels for each group.
Contract& biases(Contract& c, const char* name, const Tensor& offsets) {
  const int64_t groups = c.size('P') - 1;
  return c.that(groups > 0 && c.size('B') == groups * c.size('C'), "offsets is ", offsets.shape(), ", ", name, " has ", c.size('B'),
                " elements, in groups of ", c.size('C'));
}

// Requires an out of the dtype of the values that a and b stand for, or of that of their statistics.
Contract& gemm_dtypes(Contract& c, const Operand& a, const Operand& b, const Tensor& out) {
  const Dtype dtype = a.quantized() && b.quantized() ? Dtype::bf16 : (a.quantized() ? b : a).dense().dtype();
  return c.that(out.dtype() == dtype || out.dtype() == stats_dtype(dtype), "out is ", out.dtype(), ", the operands are ", dtype);
}

// Requires `codes` to be those of the M rows of x, rounded up to whole blocks at most.
void covers(Contract& c, const Tensor& x, const char* name, const QuantizedTensor& codes) {
  const int64_t rows = codes.shape[0], most = round_up(c.size('M'), codes.how.block());
  c.that(rows >= c.size('M') && rows <= most && codes.shape[1] == c.size('C'), "x is ", x.shape(), ", ", name, ' ', codes.shape);
}

// Columnwise codes beside rowwise ones, or the same as rowwise codes of the transpose.
void covers_columns(Contract& c, const char* rowwise, const QuantizedTensor& rows, const char* name, const QuantizedTensor& columns) {
  const bool transposed = columns.how.rowwise();
  const Shape shape = transposed ? Shape{rows.shape[1], rows.shape[0]} : rows.shape;
  c.that(rows.how.rowwise() && columns.how == (transposed ? rows.how : rows.how.transposed()) && columns.shape == shape, name, " is ",
         columns.how, ' ', columns.shape, ", ", rowwise, ' ', rows.how, ' ', rows.shape,
         ": one pass gives columnwise codes of rowwise ones of the same format, or these as rowwise ones of the transpose");
  c.that(!transposed || rows.how.format != Format::e2m1, "e2m1 has no codes of a transpose");
  c.that(rows.how.format != Format::nvfp4, "nvfp4 has no columnwise operand");
}

}  // namespace

Contract HeadLayout::contract(const char* kernel) const {
  Contract c(kernel);
  c.that(heads > 0 && kv_heads > 0 && head_dim > 0 && heads % kv_heads == 0, "layout has ", heads, " query heads, ", kv_heads,
         " key heads of ", head_dim, " channels");
  c.size('D', head_dim).size('H', heads).size('L', heads + kv_heads);
  return c.size('Q', heads * head_dim).size('K', kv_heads * head_dim).size('R', row());
}

Contract HeadLayout::contract(const char* kernel, const Tensor& qkv, int64_t batch, const Tensor& segment_starts) const {
  Contract c = contract(kernel);
  c.input("qkv", qkv, "[N, R]").input("segment_starts", segment_starts, "i32 [N]?");
  c.that(batch > 0 && c.size('N') % batch == 0, "qkv has ", c.size('N'), " rows, not ", batch, " sequences of one length");
  return c.size('B', batch).size('T', c.size('N') / batch);
}

Contract AttentionSinkGradient::contract() const {
  Contract c = layout.contract("attention sink gradient");
  c.input("out", out, "[N, Q]")
      .that(batch > 0 && c.size('N') % batch == 0, "out has ", c.size('N'), " rows, not ", batch, " sequences of one length");
  c.size('B', batch).size('T', c.size('N') / batch);
  c.input("sinks", sinks, "[H]").input("lse", lse, "stats [B, H, T]").input("dout", dout, "[N, Q]");
  return c.output("dsinks", dsinks, "stats [H]");
}

Contract Gemm::contract() const {
  Contract c("gemm");
  matrix(c, "a", a.value, "[A, B]");
  matrix(c, "b", b.value, "[C, D]");
  c.that(a.cols() == b.rows(), "op(a) is ", Shape{a.rows(), a.cols()}, ", op(b) is ", Shape{b.rows(), b.cols()});
  c.size('M', a.rows()).size('N', b.cols()).output("out", out, "floating [M, N]").input("bias", bias, "floating [N]?");
  const bool codes_only = a.quantized() && b.quantized(), codes = a.quantized() || b.quantized();
  const Dtype dtype = codes_only ? Dtype::bf16 : (a.quantized() ? b : a).dense().dtype();
  c.that(out.dtype() == dtype || out.dtype() == stats_dtype(dtype), "out is ", out.dtype(), ", the operands are ", dtype);
  c.that(!codes || !accumulate || out.dtype() == stats_dtype(dtype), "a bf16 output cannot accumulate GEMMs of quantized operands");
  const bool fits = !bias.defined() || bias.dtype() == dtype || (codes_only && bias.dtype() == Dtype::f32);
  return c.that(fits, "bias is ", bias.dtype(), ", the operands are ", dtype);
}

Contract Quantize::contract() const {
  Contract c("quantize");
  c.input("x", x, "fp32|bf16 [M, C]").output("out", out);
  allowed(c, out.how, x.dtype());
  covers(c, x, "out", out);
  if (second.defined()) {
    c.output("second", second);
    covers_columns(c, "out", out, "second", second);
  }
  return c.output("nonfinite", nonfinite, "i32 [1]?");
}

Contract Dequantize::contract() const {
  Contract c("dequantize");
  c.input("x", x).size('R', x.shape[0]).output("out", out, "fp32|bf16 [R, W]");
  const int64_t end = first_col + c.size('W'), block = x.how.block_cols;
  const bool whole = first_col % block == 0 && (end % block == 0 || end == x.shape[1]);
  c.that(first_col >= 0 && end <= x.shape[1] && whole, "out is ", out.shape(), ": columns [", first_col, ", ", end, ") of ", x.shape,
         " do not begin and end with blocks of ", x.how);
  return c.output("extreme", extreme, "i32 [1]?");
}

Contract FakeQuantize::contract() const {
  Contract c("fake_quantize");
  c.input("x", x, "fp32|bf16 [M, C]").output("out", out, "[M, C]");
  codes_shape(x.shape(), how);  // throws where there are no blocks
  allowed(c, how, x.dtype());
  return c;
}

Contract RequantizeColumns::contract() const {
  Contract c("requantize_columns");
  c.input("x", x).output("out", out);
  covers_columns(c, "x", x, "out", out);
  return c.that(!is_four_bit(x.how.format), format_name(x.how.format), " has no columnwise operand");
}

Contract SwizzleScales::contract() const {
  Contract c("swizzle_scales");
  c.input("x", x).that(!x.how.tiles(), "tiles have no swizzled form of their own");
  const bool rows = x.how.rowwise();
  return c.size('S', swizzled_bytes(x.shape[rows ? 0 : 1], x.scales.dim(rows ? 1 : 0))).output("out", out, "u8 [S]");
}

Contract QuantizationError::contract() const {
  Contract c("quantization_error");
  c.input("x", x, "fp32|bf16 [M, C]").input("q", q);
  covers(c, x, "q", q);
  c.input("rows", rows, "i32 [M]?");
  return c.size('S', size).output("out", out, "fp64 [S]");
}

Contract Simulate::contract() const {
  Contract c("simulate");
  c.input("x", x, "fp32|bf16 [M, C]").output("out", out, "floating [R, C]");
  c.that(out.dtype() == Dtype::f32 || out.dtype() == x.dtype(), "out is ", out.dtype(), ", x ", x.dtype());
  c.that(c.size('R') >= c.size('M'), "out has ", c.size('R'), " rows, fewer than x: ", c.size('M'));
  const auto& [exponent, mantissa] = how.element;
  c.that(exponent > 0 && exponent <= FreeElement::kMostExponentBits && mantissa >= 0 && mantissa <= FreeElement::kMostMantissaBits,
         "elements are ", element_text(how.element));
  c.that(how.block_rows > 0 && how.block_cols > 0, "blocks are ", how.block_rows, 'x', how.block_cols);
  c.that(how.rule != ScaleRule::flashinfer && how.rule != ScaleRule::mse && how.rule != ScaleRule::nearest, "the rule ",
         scale_rule_name(how.rule), " is for codes only");
  c.that(how.contraction == 0 || how.contraction == 1, "a matrix has no dimension ", how.contraction);
  const int64_t length = how.hadamard, contracted = out.dim(how.contraction);
  c.that(length == 0 || length == 16 || length == 32, "the length of the Hadamard transform must be 16 or 32, got ", length);
  c.that(length == 0 || contracted % length == 0, "out is ", out.shape(), ", whose dimension ", how.contraction, " is not a multiple of ",
         length);
  if (how.rounding == Rounding::stochastic) {
    const auto fits = [](const std::vector<int64_t>& places, int64_t size) { return places.empty() || std::ssize(places) == size; };
    c.that(draws.columns > 0 && fits(draws.row_places, c.size('R')) && fits(draws.column_places, c.size('C')), "draws for out, ",
           out.shape(), ", have ", draws.columns, " columns, and places of ", draws.row_places.size(), " rows and ",
           draws.column_places.size(), " columns");
  }
  c.that(!rows.defined() || error.defined(), "rows needs error").input("rows", rows, "i32 [R]?");
  return c.size('S', QuantizationError::size).output("error", error, "fp64 [S]?");
}

Contract& RoutingRule::check(Contract& c, int64_t experts) const {
  c.that(top_k > 0 && top_k <= experts, "top_k is ", top_k, " of ", experts, " experts");
  c.that(groups > 0 && experts % groups == 0 && groups_kept > 0 && groups_kept <= groups && groups_kept * (experts / groups) >= top_k,
         "groups is ", groups, " and groups_kept ", groups_kept, ", which does not fit top_k ", top_k, " of ", experts, " experts");
  return c.that(!softmax_after_topk || score == RouterScore::softmax, "softmax_after_topk needs score softmax");
}

Contract RouteForward::contract() const {
  Contract c("route");
  c.input("logits", logits, "stats [N, E]").input("bias", bias, "stats [E]?");
  rule.check(c, c.size('E')).size('K', rule.top_k);
  c.output("experts", experts, "i32 [N, K]").output("weights", weights, "stats [N, K]").output("scores", scores, "stats [N, E]");
  c.output("counts", counts, "i32 [S, E]");
  sequences(c);
  return c;
}

Contract RouteBackward::contract() const {
  Contract c("route backward");
  c.input("logits", logits, "stats [N, E]").input("scores", scores, "stats [N, E]").input("experts", experts, "i32 [N, K]");
  c.input("counts", counts, "i32 [S, E]").input("dweights", dweights, "stats [N, K]").output("dlogits", dlogits, "stats [N, E]");
  rule.check(c, c.size('E')).that(rule.top_k == c.size('K'), "experts is ", experts.shape(), ", but top_k is ", rule.top_k);
  sequences(c);
  return c;
}

Contract RouterLosses::contract() const {
  Contract c("router losses");
  c.input("logits", logits, "stats [N, E]").input("scores", scores, "stats [N, E]").input("counts", counts, "i32 [S, E]");
  rule.check(c, c.size('E')).output("out", out, "fp64 [3]");
  sequences(c);
  return c;
}

int64_t Permute::bytes_moved() const {
  const auto* const codes = std::get_if<QuantizedTensor>(&out);
  return assignments.bytes() + 2 * (codes ? codes->codes.bytes() + codes->scales.bytes() : std::get<Tensor>(out).bytes());
}

int64_t rows_of_groups(const Tensor& offsets, const HostGroups* host, int64_t rows) {
  if (host != nullptr && !host->offsets.empty()) return host->offsets.back();
  const bool known = offsets.device().host_memory() && !is_dry(offsets.device_bytes());
  return known ? offsets.data<int32_t>()[offsets.elements() - 1] : rows;
}

int64_t dispatch_rows(int64_t assignments, int64_t experts, int64_t multiple) {
  return (assignments + std::min(experts, assignments) * (multiple - 1)) / multiple * multiple;
}

Contract DispatchTable::contract() const {
  Contract c("dispatch_table");
  c.input("experts", experts, "i32 [N, K]").output("offsets", offsets, "i32 [P]").output("rows", rows, "i32 [N, K]");
  c.output("assignments", assignments, "i32 [R]").that(c.size('P') > 1 && multiple > 0 && capacity >= 0, "offsets is ", offsets.shape());
  const int64_t room = dispatch_rows(experts.elements(), c.size('P') - 1, multiple);
  c.that(c.size('R') <= INT32_MAX, "assignments has ", c.size('R'), " rows, too many for indices of 32 bits");
  return c.that(c.size('R') % multiple == 0 && c.size('R') >= room, "assignments has ", c.size('R'), " rows, expected ", room);
}

Contract ArrivalTable::contract() const {
  Contract c("arrival_table");
  c.input("counts", counts, "i32 [S, E]").that(c.size('E') > 0 && multiple > 0, "counts is ", counts.shape(), ", multiple ", multiple);
  c.size('P', c.size('E') + 1).size('Q', c.size('E') * c.size('S') + 1);
  c.output("offsets", offsets, "i32 [P]").output("rows", rows, "i32 [A]").output("assignments", assignments, "i32 [R]");
  c.output("source_offsets", source_offsets, "i32 [Q]?");
  c.that(c.size('R') <= INT32_MAX, "assignments has ", c.size('R'), " rows, too many for indices of 32 bits");
  return c.that(c.size('R') % multiple == 0 && c.size('R') >= c.size('A'), "assignments has ", c.size('R'), " rows, but rows has ",
                c.size('A'));
}

Contract Permute::contract() const {
  Contract c("permute");
  c.that(x.index() == out.index(), "x and out must both be codes or both be values");
  if (const auto* codes = std::get_if<QuantizedTensor>(&x)) {
    const auto& to = std::get<QuantizedTensor>(out);
    c.input("x", *codes).output("out", to).that(codes->how.rowwise() && to.how == codes->how, "x is ", codes->how, ", out ", to.how);
    c.size('R', to.shape[0]).that(to.shape[1] == codes->shape[1], "x is ", codes->shape, ", out ", to.shape);
  } else {
    c.input("x", std::get<Tensor>(x), "[N, C]").output("out", std::get<Tensor>(out), "[R, C]");
  }
  part.check(c.size('V', shape_of(x)[0]));
  c.that(part.rows == 0 || per_row == 1, "per_row is ", per_row, ", and a part of a table has 1");
  return c.input("assignments", assignments, "i32 [R]").that(per_row > 0, "per_row is ", per_row);
}

namespace {

Contract& known_groups(Contract& c, const HostGroups* host, int64_t rows) {
  if (!host || host->offsets.empty()) return c;
  const std::vector<int64_t>& offsets = host->offsets;
  c.that(std::ssize(offsets) == c.size('P'), "host has ", offsets.size(), " offsets, but offsets has ", c.size('P'));
  return c.that(std::ranges::is_sorted(offsets) && offsets.front() >= 0 && offsets.back() <= rows, "the offsets in host do not divide ",
                rows, " rows into groups");
}

}  // namespace

Contract GroupedGemm::contract() const {
  Contract c("grouped_gemm");
  matrix(c, "a", a.value, "[R, I]");
  matrix(c, "b", b.value, "[C, D]");
  c.input("offsets", offsets, "i32 [P]").output("out", out, "floating [R, O]");
  const Shape grouped = shape_of(b.value);
  const int64_t matrices = c.size('P') - 1, rows = matrices > 0 ? grouped[0] / matrices : 0,
                block = b.quantized() ? b.quantized()->how.block_rows : 1;
  c.that(!a.transposed && matrices > 0 && grouped[0] % matrices == 0 && rows % block == 0, "offsets is ", offsets.shape(), ", for ",
         matrices, " matrices, but b is ", grouped);
  const int64_t depth = b.transposed ? grouped[1] : rows, cols = b.transposed ? rows : grouped[1];
  c.that(a.rows() == out.dim(0) && a.cols() == depth && out.dim(1) == cols, "out is ", out.shape(), ", a ", shape_of(a.value),
         ", op(b) of a group ", Shape{depth, cols});
  known_groups(c, host.get(), out.dim(0));
  return gemm_dtypes(c, a, b, out);
}

Contract GroupedWeightGradient::contract() const {
  Contract c("grouped_weight_gradient");
  matrix(c, "a", a, "[R, A]");
  matrix(c, "b", b, "[R, B]");
  c.input("offsets", offsets, "i32 [P]").output("out", out, "stats [M, B]");
  const int64_t groups = c.size('P') - 1;
  c.that(shape_of(a)[0] == shape_of(b)[0] && groups > 0 && out.shape() == Shape{groups * shape_of(a)[1], shape_of(b)[1]}, "out is ",
         out.shape(), " of ", groups, " groups, a ", shape_of(a), ", b ", shape_of(b));
  known_groups(c, host.get(), shape_of(a)[0]);
  return gemm_dtypes(c, {a}, {b}, out);
}

Contract AddGroupedBias::contract() const {
  Contract c("add_grouped_bias");
  c.input("bias", bias, "[B]").in_place("out", out, "[R, C]").input("x", x, "stats [R, C]").input("offsets", offsets, "i32 [P]");
  return biases(c, "bias", offsets).input("row_weights", row_weights, "stats [R]?");
}

Contract GroupedBiasGradient::contract() const {
  Contract c("grouped_bias_gradient");
  c.input("dy", dy, "[R, C]").output("dbias", dbias, "stats [B]").input("offsets", offsets, "i32 [P]");
  return biases(c, "dbias", offsets).input("row_weights", row_weights, "stats [R]?");
}

Contract GroupedBiasDot::contract() const {
  Contract c("grouped_bias_dot");
  c.input("dy", dy, "[R, C]").input("bias", bias, "[B]").input("offsets", offsets, "i32 [P]").output("out", out, "stats [R]");
  return biases(c, "bias", offsets);
}

}  // namespace mantissa
