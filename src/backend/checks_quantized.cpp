// Contracts of the kernels that read or write quantised tensors.
#include "backend/checks.h"
#include "backend/contract.h"
#include "mantissa/backend/functions.h"
#include "mantissa/formats/swizzle.h"

namespace mantissa {
namespace {

// Operands that are not quantised share this dtype.
Dtype high_precision_dtype(const Gemm& k) {
  if (!k.a.quantized()) return k.a.dense().dtype();
  return k.b.quantized() ? Dtype::bf16 : k.b.dense().dtype();
}

void fp32_or_bf16(Contract& contract, const char* operand, const Tensor& tensor) {
  contract.that(tensor.dtype() == Dtype::f32 || tensor.dtype() == Dtype::bf16, operand, " is ", tensor.dtype(), ", expected fp32 or bf16");
}

void formats_allow(Contract& contract, const Quantization& how, Dtype input) {
  if (how.rule != ScaleRule::flashinfer) return;
  contract.that(how.format == Format::e2m1 && input == Dtype::bf16, "the rule flashinfer takes bf16 to e2m1, not ", input, " to ", how);
}

}  // namespace

void check(const Gemm& k) {
  Contract contract("gemm");
  contract.input("a", k.a.value).input("b", k.b.value);
  const Dtype dtype = high_precision_dtype(k);
  if (!k.b.quantized()) contract.that(k.b.dense().dtype() == dtype, "a is ", dtype, ", b is ", k.b.dense().dtype());
  const int64_t rows = k.a.rows(), columns = k.b.cols();
  contract.that(k.a.cols() == k.b.rows(), "op(a) is ", Shape{rows, k.a.cols()}, ", op(b) is ", Shape{k.b.rows(), columns});
  const Dtype out = k.out.dtype();
  contract.that(out == dtype || out == stats_dtype(dtype), "out is ", out, ", the operands are ", dtype);
  const bool quantized = k.a.quantized() || k.b.quantized();
  contract.that(!quantized || !k.accumulate || out == stats_dtype(dtype), "a bf16 output cannot accumulate products of quantised operands");
  contract.output("out", k.out, out, {rows, columns});
  if (!k.bias.defined()) return;
  const bool either = k.a.quantized() && k.b.quantized() && k.bias.dtype() == Dtype::f32;
  contract.input("bias", k.bias, either ? Dtype::f32 : dtype, {columns});
}

void check(const Quantize& k) {
  Contract contract("quantize");
  contract.input("x", k.x).rank("x", k.x, 2);
  fp32_or_bf16(contract, "x", k.x);
  contract.output("out", k.out);
  formats_allow(contract, k.out.how, k.x.dtype());
  const int64_t rows = k.out.shape[0];
  const int64_t most = whole_blocks(k.x.dim(0), k.out.how.block());
  contract.that(rows >= k.x.dim(0) && rows <= most && k.out.shape[1] == k.x.dim(1), "x is ", k.x.shape(), ", out ", k.out.shape);
  if (k.second.defined()) {
    contract.output("second", k.second).that(k.second.shape == k.out.shape, "out is ", k.out.shape, ", second ", k.second.shape);
    contract.that(k.out.how.rowwise() && k.second.how == k.out.how.transposed(), "second is ", k.second.how, ", out ", k.out.how,
                  ": one pass gives rowwise and columnwise codes of one format");
  }
  contract.optional_output("nonfinite", k.nonfinite, Dtype::i32, {1});
}

void check(const Dequantize& k) {
  Contract contract("dequantize");
  contract.input("x", k.x).rank("out", k.out, 2);
  const int64_t width = k.out.dim(1), block = k.x.how.block_cols;
  const bool whole = k.first_col >= 0 && k.first_col + width <= k.x.shape[1] && k.first_col % block == 0 && width % block == 0;
  contract.that(whole, "out is ", k.out.shape(), ": columns [", k.first_col, ", ", k.first_col + width, ") of ", k.x.shape,
                " are not whole blocks of ", k.x.how);
  contract.output("out", k.out, k.out.dtype(), {k.x.shape[0], width});
  fp32_or_bf16(contract, "out", k.out);
  contract.optional_output("extreme", k.extreme, Dtype::i32, {1});
}

void check(const FakeQuantize& k) {
  Contract contract("fake_quantize");
  contract.input("x", k.x);
  fp32_or_bf16(contract, "x", k.x);
  codes_shape(k.x.shape(), k.how);
  formats_allow(contract, k.how, k.x.dtype());
  contract.output("out", k.out, k.x.dtype(), k.x.shape());
}

void check(const RequantizeColumns& k) {
  Contract contract("requantize_columns");
  contract.input("x", k.x).output("out", k.out).that(k.x.shape == k.out.shape, "x is ", k.x.shape, ", out ", k.out.shape);
  contract.that(k.x.how.rowwise() && k.out.how == k.x.how.transposed(), "x is ", k.x.how, ", out ", k.out.how,
                ": rowwise codes become columnwise ones of the same block");
  contract.that(k.x.how.format != Format::e2m1, "e2m1 has no columnwise operand");
}

void check(const SwizzleScales& k) {
  Contract contract("swizzle_scales");
  contract.input("x", k.x).that(!k.x.how.tiles(), "tiles have no swizzled form of their own");
  const bool rows = k.x.how.rowwise();
  const int64_t outer = k.x.shape[rows ? 0 : 1], inner = k.x.scales.dim(rows ? 1 : 0);
  contract.output("out", k.out, Dtype::u8, {swizzled_bytes(outer, inner)});
}

void check(const QuantizationError& k) {
  Contract contract("quantization_error");
  contract.input("x", k.x).rank("x", k.x, 2);
  fp32_or_bf16(contract, "x", k.x);
  contract.input("q", k.q);
  const int64_t rows = k.q.shape[0];
  contract.that(rows >= k.x.dim(0) && rows <= whole_blocks(k.x.dim(0), k.q.how.block()) && k.q.shape[1] == k.x.dim(1), "x is ", k.x.shape(),
                ", q ", k.q.shape);
  contract.output("out", k.out, Dtype::f64, {QuantizationError::size});
}

}  // namespace mantissa
