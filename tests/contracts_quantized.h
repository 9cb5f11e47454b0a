// What the kernels on quantised tensors refuse.
#pragma once

#include "contract_check.h"

namespace mantissa::test {

inline void gemm_of_codes(ContractCheck& c) {
  const QuantizedTensor a = c.codes({32, 64}, {Format::e4m3}), b = c.codes({96, 64}, {Format::e4m3});
  const auto call = [](Operand left, Operand right, const Tensor& to, bool accumulate) {
    return Gemm{.a = std::move(left), .b = std::move(right), .out = to, .accumulate = accumulate};
  };
  c.accepts(call({a}, {b, true}, c.f32({32, 96}), true));
  c.accepts(call({a}, {b, true}, c.bf16s({32, 96}), false));
  c.accepts(call({c.bf16s({5, 64})}, {b, true}, c.bf16s({5, 96}), false));
  c.refuses(call({a}, {b}, c.f32({32, 96}), false), "gemm", {"[32, 64]", "[96, 64]"});
  c.refuses(call({a}, {b, true}, c.bf16s({32, 96}), true), "gemm", {"accumulate"});
  QuantizedTensor torn = b;
  torn.scales = c.u8({96, 3});
  c.refuses(call({a}, {torn, true}, c.f32({32, 96}), false), "gemm", {"b is u8 [96, 3]", "[96, 2]"});
  torn = b;
  torn.how.format = Format::none;
  c.refuses(call({a}, {torn, true}, c.f32({32, 96}), false), "gemm", {"b has no format"});
}

inline void quantize(ContractCheck& c) {
  const Quantization rows{Format::e4m3}, columns = rows.transposed();
  const Tensor x = c.f32({64, 32});
  c.accepts(Quantize{.x = x, .out = c.codes({64, 32}, rows), .second = c.codes({64, 32}, columns)});
  c.accepts(Quantize{.x = c.f32({33, 32}), .out = c.codes({64, 32}, columns)});
  c.refuses(Quantize{.x = c.f32({32, 32}), .out = c.codes({64, 32}, columns)}, "quantize", {"[32, 32]", "[64, 32]"});
  c.refuses(Quantize{.x = x, .out = c.codes({64, 64}, rows)}, "quantize", {"[64, 32]", "[64, 64]"});
  c.refuses(Quantize{.x = c.i32({64, 32}), .out = c.codes({64, 32}, rows)}, "quantize", {"x is i32"});
  c.refuses(Quantize{.x = x, .out = {}}, "quantize", {"out has no format"});
  c.refuses(Quantize{.x = x, .out = c.codes({64, 32}, rows), .second = c.codes({64, 32}, rows)}, "quantize", {"second is e4m3 1x32"});
  c.refuses(Quantize{.x = x, .out = c.codes({64, 32}, rows), .nonfinite = c.f32({1})}, "quantize", {"nonfinite"});
  const Quantization fake{Format::e2m1, 1, 32, ScaleRule::flashinfer};
  c.refuses(Quantize{.x = x, .out = c.codes({64, 32}, fake)}, "quantize", {"flashinfer", "fp32"});
}

inline void dequantize(ContractCheck& c) {
  const QuantizedTensor x = c.codes({64, 32}, {Format::e5m2, 32, 32});
  c.accepts(Dequantize{.x = x, .out = c.bf16s({64, 32})});
  c.refuses(Dequantize{.x = x, .out = c.f64({64, 32})}, "dequantize", {"out is fp64"});
  c.refuses(Dequantize{.x = x, .out = c.f32({32, 64})}, "dequantize", {"out", "[32, 64]"});
  const QuantizedTensor wide = c.codes({64, 96}, {Format::e5m2, 32, 32});
  c.accepts(Dequantize{.x = wide, .out = c.f32({64, 32}), .first_col = 64});
  c.refuses(Dequantize{.x = wide, .out = c.f32({64, 32}), .first_col = 16}, "dequantize", {"[16, 48)", "whole blocks"});
  c.refuses(Dequantize{.x = wide, .out = c.f32({64, 64}), .first_col = 64}, "dequantize", {"[64, 128)", "[64, 96]"});
  c.refuses(Dequantize{.x = wide, .out = c.f32({64, 32}), .first_col = -32}, "dequantize", {"[-32, 0)"});
  c.refuses(Dequantize{.x = x, .out = c.f32({64, 32}), .extreme = c.i32({2})}, "dequantize", {"extreme", "[2]"});
}

inline void fake_quantize(ContractCheck& c) {
  const Tensor x = c.f32({4, 64});
  const Quantization how{Format::e2m1, 1, 16};
  c.accepts(FakeQuantize{.x = x, .out = c.f32({4, 64}), .how = how});
  c.refuses(FakeQuantize{.x = x, .out = x, .how = how}, "fake_quantize", {"out overlaps x"});
  c.refuses(FakeQuantize{.x = x, .out = c.bf16s({4, 64}), .how = how}, "fake_quantize", {"out is bf16"});
}

inline void requantize_columns(ContractCheck& c) {
  const Quantization how{Format::e4m3};
  c.accepts(RequantizeColumns{.x = c.codes({64, 32}, how), .out = c.codes({64, 32}, how.transposed())});
  c.refuses(RequantizeColumns{.x = c.codes({64, 32}, how), .out = c.codes({64, 32}, how)}, "requantize_columns", {"out e4m3 1x32"});
  c.refuses(RequantizeColumns{.x = c.codes({64, 32}, how), .out = c.codes({64, 64}, how.transposed())}, "requantize_columns", {"[64, 64]"});
}

inline void swizzle_scales(ContractCheck& c) {
  c.accepts(SwizzleScales{.x = c.codes({64, 32}, {Format::e4m3}), .out = c.u8({512})});
  c.refuses(SwizzleScales{.x = c.codes({64, 32}, {Format::e4m3}), .out = c.u8({511})}, "swizzle_scales", {"[511]", "[512]"});
  c.refuses(SwizzleScales{.x = c.codes({64, 32}, {Format::e4m3, 32, 32}), .out = c.u8({512})}, "swizzle_scales", {"tiles"});
}

inline void quantization_error(ContractCheck& c) {
  const QuantizedTensor q = c.codes({64, 32}, {Format::e4m3});
  const Tensor out = c.f64({QuantizationError::size});
  c.accepts(QuantizationError{.x = c.f32({64, 32}), .q = q, .out = out});
  c.accepts(QuantizationError{.x = c.bf16s({33, 32}), .q = q, .out = out});
  c.refuses(QuantizationError{.x = c.f32({32, 32}), .q = q, .out = out}, "quantization_error", {"[32, 32]", "[64, 32]"});
  c.refuses(QuantizationError{.x = c.f64({64, 32}), .q = q, .out = out}, "quantization_error", {"x is fp64"});
  c.refuses(QuantizationError{.x = c.f32({64, 32}), .q = q, .out = c.f64({5})}, "quantization_error", {"out", "[5]", "[261]"});
  c.refuses(QuantizationError{.x = c.f32({64, 32}), .q = {}, .out = out}, "quantization_error", {"q has no format"});
}

}  // namespace mantissa::test
