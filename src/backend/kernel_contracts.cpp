// Contracts of more than a few lines: of kernels on packed heads, and of those that take quantised tensors.
#include "mantissa/backend/backend.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/swizzle.h"

namespace mantissa {
namespace {

void allowed(Contract& c, const Quantization& how, Dtype input) {
  c.that(how.rule != ScaleRule::flashinfer || (how.format == Format::e2m1 && input == Dtype::bf16),
         "the rule flashinfer takes bf16 to e2m1, not ", input, " to ", how);
}

void matrix(Contract& c, const char* name, const Operand& operand, const char* spec) {
  operand.quantized() ? c.input(name, *operand.quantized()) : c.input(name, operand.dense(), spec);
}

// `codes` are of the M rows of x, rounded up to whole blocks at most.
void covers(Contract& c, const Tensor& x, const char* name, const QuantizedTensor& codes) {
  const int64_t rows = codes.shape[0], most = round_up(c.size('M'), codes.how.block());
  c.that(rows >= c.size('M') && rows <= most && codes.shape[1] == c.size('C'), "x is ", x.shape(), ", ", name, ' ', codes.shape);
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

Contract Gemm::contract() const {
  Contract c("gemm");
  matrix(c, "a", a, "[A, B]");
  matrix(c, "b", b, "[C, D]");
  c.that(a.cols() == b.rows(), "op(a) is ", Shape{a.rows(), a.cols()}, ", op(b) is ", Shape{b.rows(), b.cols()});
  c.size('M', a.rows()).size('N', b.cols()).output("out", out, "floating [M, N]").input("bias", bias, "floating [N]?");
  const bool codes_only = a.quantized() && b.quantized(), codes = a.quantized() || b.quantized();
  const Dtype dtype = codes_only ? Dtype::bf16 : (a.quantized() ? b : a).dense().dtype();
  c.that(out.dtype() == dtype || out.dtype() == stats_dtype(dtype), "out is ", out.dtype(), ", the operands are ", dtype);
  c.that(!codes || !accumulate || out.dtype() == stats_dtype(dtype), "a bf16 output cannot accumulate products of quantised operands");
  const bool fits = !bias.defined() || bias.dtype() == dtype || (codes_only && bias.dtype() == Dtype::f32);
  return c.that(fits, "bias is ", bias.dtype(), ", the operands are ", dtype);
}

Contract Quantize::contract() const {
  Contract c("quantize");
  c.input("x", x, "fp32|bf16 [M, C]").output("out", out);
  allowed(c, out.how, x.dtype());
  covers(c, x, "out", out);
  if (second.defined()) {
    c.output("second", second).that(second.shape == out.shape, "out is ", out.shape, ", second ", second.shape);
    c.that(out.how.rowwise() && second.how == out.how.transposed(), "second is ", second.how, ", out ", out.how,
           ": one pass gives rowwise and columnwise codes of one format");
  }
  return c.output("nonfinite", nonfinite, "i32 [1]?");
}

Contract Dequantize::contract() const {
  Contract c("dequantize");
  c.input("x", x).size('R', x.shape[0]).output("out", out, "fp32|bf16 [R, W]");
  const int64_t end = first_col + c.size('W'), block = x.how.block_cols;
  c.that(first_col >= 0 && end <= x.shape[1] && first_col % block == 0 && end % block == 0, "out is ", out.shape(), ": columns [",
         first_col, ", ", end, ") of ", x.shape, " are not whole blocks of ", x.how);
  return c.output("extreme", extreme, "i32 [1]?");
}

Contract FakeQuantize::contract() const {
  Contract c("fake_quantize");
  c.input("x", x, "fp32|bf16 [M, C]").output("out", out, "[M, C]");
  codes_shape(x.shape(), how);  // throws where blocks are not whole
  allowed(c, how, x.dtype());
  return c;
}

Contract RequantizeColumns::contract() const {
  Contract c("requantize_columns");
  c.input("x", x).output("out", out).that(x.shape == out.shape, "x is ", x.shape, ", out ", out.shape);
  c.that(x.how.rowwise() && out.how == x.how.transposed(), "x is ", x.how, ", out ", out.how,
         ": rowwise codes become columnwise ones of the same block");
  return c.that(x.how.format != Format::e2m1, "e2m1 has no columnwise operand");
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
  return c.size('S', size).output("out", out, "fp64 [S]");
}

}  // namespace mantissa
