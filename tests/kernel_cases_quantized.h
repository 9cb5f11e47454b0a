// Cases of the kernels that quantize: every output is integers, or exact, so backends agree to the bit.
#pragma once

#include <cmath>

#include "kernel_operands.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/swizzle.h"

namespace mantissa::test {

// Normal-like values whose magnitudes span 2^-spread .. 2^spread from row to row and 2^-3 .. 2^3 within a row; every 7th is 0.
inline std::vector<double> wide_values(int64_t rows, int64_t cols, uint32_t what, int spread) {
  std::vector<double> out = random_values(rows * cols, what);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int row_exponent = spread == 0 ? 0 : static_cast<int>((i / cols * 37) % (2 * spread + 1)) - spread;
    double& value = out[static_cast<size_t>(i)];
    value = i % 7 == 6 ? 0.0 : std::ldexp(value, row_exponent + static_cast<int>(i % 5) - 3);
  }
  return out;
}

inline Tensor wide_input(Operands& o, int64_t rows, int64_t cols, int spread) {
  Tensor x = o.input({rows, cols});  // NaN or subnormal where the test asks for it
  const std::vector<double> drawn = values(x);
  std::vector<double> wide = wide_values(rows, cols, 77, spread);
  for (size_t i = 0; i < wide.size(); ++i) {
    if (std::isnan(drawn[i]) || std::abs(drawn[i]) < 0x1p-126) wide[i] = drawn[i];
  }
  return o.given(o.dtype(), {rows, cols}, wide);
}

inline QuantizedTensor quantized_output(Operands& o, const char* codes, const char* scales, Shape shape, const Quantization& how) {
  return {.codes = o.output_of(Dtype::u8, codes, codes_shape(shape, how), kExact),
          .scales = o.output_of(Dtype::u8, scales, scales_shape(shape, how), kExact),
          .shape = shape,
          .how = how};
}

inline QuantizedTensor quantized_input(Operands& o, int64_t rows, int64_t cols, const Quantization& how, int spread) {
  const QuantizedTensor out{.codes = o.given(Dtype::u8, codes_shape({rows, cols}, how), {}),
                            .scales = o.given(Dtype::u8, scales_shape({rows, cols}, how), {}),
                            .shape = {rows, cols},
                            .how = how};
  o.device().run(Quantize{.x = tensor_of(o.device(), Dtype::bf16, {rows, cols}, wide_values(rows, cols, 78, spread)), .out = out});
  return out;
}

struct QuantizedCase {
  int64_t rows, cols;
  Quantization how;
  int spread;
  std::string name() const {
    std::ostringstream out;
    out << named({rows, cols}) << '_' << how << "_2^" << spread;
    return out.str();
  }
};

inline std::vector<QuantizedCase> quantized_shapes() {
  std::vector<QuantizedCase> out;
  for (const Format format : {Format::e4m3, Format::e5m2, Format::e2m1}) {
    for (const ScaleRule rule : {ScaleRule::rceil, ScaleRule::floor, ScaleRule::even, ScaleRule::ceil, ScaleRule::mse}) {
      for (const auto& [rows, cols, block, spread] :
           {std::tuple<int64_t, int64_t, int64_t, int>{32, 96, 32, 120}, {64, 32, 32, 2}, {128, 384, 128, 120}}) {
        if (rule != ScaleRule::rceil && rows != 32) continue;  // quantization_bits_test.cpp has all rules in blocks of any length
        out.push_back({rows, cols, {format, 1, block, rule}, spread});
        out.push_back({rows, cols, {format, block, 1, rule}, spread});
        out.push_back({rows, cols, {format, block, block, rule}, spread});
      }
    }
  }
  for (const int64_t block : {8, 16, 32, 48, 64, 96}) out.push_back({5, 6 * block, {Format::e2m1, 1, block, ScaleRule::flashinfer}, 120});
  for (const int64_t block : {16, 48, 96}) out.push_back({5, 3 * block, {Format::e4m3, 1, block, ScaleRule::floor}, 8});
  out.push_back({64, 48, {Format::e5m2, 32, 1}, 8});
  // The last blocks are smaller: in whole spans of 32 columns, in packs of 8, and in neither.
  for (const Format format : {Format::e4m3, Format::e2m1}) {
    for (const auto& [rows, cols, block] :
         {std::tuple<int64_t, int64_t, int64_t>{160, 448, 128}, {70, 200, 128}, {45, 90, 32}, {13, 20, 7}}) {
      for (const auto& [down, across] : {std::pair<int64_t, int64_t>{1, block}, {block, 1}, {block, block}})
        out.push_back({rows, cols, {format, down, across}, rows > 100 ? 120 : 2});
    }
  }
  // Whole packs and not, smaller last blocks, and scales of the tensor with which blocks are beyond the largest and below the least scale.
  for (const int64_t cols : {96, 80, 24, 20}) {
    for (const int8_t exponent : std::initializer_list<int8_t>{0, -8, 40})
      out.push_back({37, cols, {Format::nvfp4, 1, 16, ScaleRule::nearest, {}, exponent}, exponent == 0 ? 2 : 60});
  }
  for (const int8_t exponent : std::initializer_list<int8_t>{-kMostTensorExponent, kMostTensorExponent})
    out.push_back({37, 112, {Format::nvfp4, 1, 16, ScaleRule::nearest, {}, exponent}, 70});
  for (const int64_t cols : {96, 40}) out.push_back({37, cols, {Format::nvfp4, 1, 16, ScaleRule::mse, {}, -8}, cols == 96 ? 2 : 60});
  for (const int64_t cols : {80, 88}) out.push_back({5, cols, {Format::e2m1, 1, 32, ScaleRule::flashinfer}, 2});
  return out;
}

inline void quantize_cases(Cases& add) {
  for (const QuantizedCase& c : quantized_shapes()) {
    const bool flashinfer = c.how.rule == ScaleRule::flashinfer;
    for (const int64_t missing : {0, 5}) {
      if (missing >= c.how.block_rows) continue;
      add("Quantize", c.name() + "_-" + std::to_string(missing), [=](Operands& o) {
        const Tensor drawn = wide_input(o, c.rows - missing, c.cols, c.spread);
        const Tensor x = flashinfer ? converted(drawn, Dtype::bf16) : drawn;
        const QuantizedTensor out = quantized_output(o, "codes", "scales", {c.rows, c.cols}, c.how);
        const Tensor nonfinite = o.updated("nonfinite", o.given(Dtype::i32, {1}, {0}), kExact);
        o.device().run(Quantize{.x = x, .out = out, .nonfinite = nonfinite});
      });
    }
    if (!c.how.rowwise() || flashinfer || c.how.format == Format::nvfp4) continue;
    add("Quantize", c.name() + "_both", [=](Operands& o) {
      const Tensor x = wide_input(o, c.rows - 3, c.cols, c.spread);
      const QuantizedTensor rows = quantized_output(o, "codes", "scales", {c.rows, c.cols}, c.how);
      const QuantizedTensor columns = quantized_output(o, "column codes", "column scales", {c.rows, c.cols}, c.how.transposed());
      o.device().run(Quantize{.x = x, .out = rows, .second = columns});
    });
  }
}

inline std::vector<Simulation> simulations() {
  std::vector<Simulation> out;
  for (const FreeElement element : {FreeElement{2, 1}, {3, 2}, {1, 2}, {4, 3}, {7, 7}}) {
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 16}, {16, 1}, {16, 16}, {3, 5}}) {
      for (const SimulatedScale scale : {SimulatedScale::e8m0, SimulatedScale::e4m3}) {
        out.push_back({.element = element, .block_rows = rows, .block_cols = columns, .scale = scale});
      }
    }
  }
  for (const int64_t length : {16, 32}) {
    for (const int contraction : {0, 1}) {
      Simulation how{.element = {2, 1}, .scale = SimulatedScale::e4m3, .rounding = Rounding::stochastic};
      out.push_back(how.along(contraction, length));
    }
  }
  return out;
}

// Adds cases for devices that have the kernel (has_kernel()).
inline void simulate_cases(Cases& add) {
  for (const Simulation& how : simulations()) {
    std::ostringstream name;
    name << how << (how.contraction == 0 ? "_down" : "");
    add("Simulate", name.str(), [=](Operands& o) {
      const int64_t rows = how.hadamard > 0 && how.contraction == 0 ? 64 : 39;
      const Tensor x = wide_input(o, rows == 64 ? 64 - 3 : 39, 96, 8), out = o.output("out", {rows, 96}, kExact);
      const Tensor error = o.given(Dtype::f64, {QuantizationError::size}, std::vector<double>(QuantizationError::size, std::nan("")));
      o.updated("error", error, kExact);
      o.device().run(Simulate{.x = x, .out = out, .how = how, .draws = {.seed = 3, .columns = 96}, .error = error});
      o.device().run(Simulate{.x = x, .out = out, .how = how, .draws = {.seed = 3, .columns = 96}});
    });
  }
}

// Two sums, whose order is the reference's on a CPU and that of its threads on a device, and whole numbers.
inline Tensor error_output(Operands& o) {
  const Tolerance sums = o.device().host_memory() ? kExact : Tolerance{1e-12, 1e-12};
  const Tensor out = o.given(Dtype::f64, {QuantizationError::size}, std::vector<double>(QuantizationError::size, std::nan("")));
  o.updated("sums", out.slice(0, QuantizationError::clipped), sums);
  o.updated("counts", out.slice(QuantizationError::clipped, QuantizationError::size), kExact);
  return out;
}

inline void dequantize_cases(Cases& add) {
  for (const QuantizedCase& c : quantized_shapes()) {
    add("Dequantize", c.name(), [=](Operands& o) {
      const QuantizedTensor x = quantized_input(o, c.rows, c.cols, c.how, c.spread);
      const Tensor extreme = o.updated("extreme", o.given(Dtype::i32, {1}, {0}), kExact);
      o.device().run(Dequantize{.x = x, .out = o.output("out", {c.rows, c.cols}, kExact), .extreme = extreme});
    });
    const int64_t first = c.cols / 3 / c.how.block() * c.how.block();  // the middle third, where there is one
    const int64_t last = (c.cols - first) % c.how.block_cols == 0 ? c.cols - first : c.cols;
    add("Dequantize", c.name() + "_columns", [=](Operands& o) {
      const QuantizedTensor x = quantized_input(o, c.rows, c.cols, c.how, c.spread);
      const Tensor extreme = o.updated("extreme", o.given(Dtype::i32, {1}, {0}), kExact);
      const Tensor out = o.output("out", {c.rows, last - first}, kExact);
      o.device().run(Dequantize{.x = x, .out = out, .first_col = first, .extreme = extreme});
    });
    add("QuantizationError", c.name(), [=](Operands& o) {
      const Tensor x = wide_input(o, c.rows - std::min<int64_t>(c.how.block_rows - 1, 5), c.cols, c.spread);
      const QuantizedTensor q = quantized_input(o, c.rows, c.cols, c.how, c.spread);
      o.device().run(QuantizationError{.x = x, .q = q, .out = error_output(o)});
    });
    add("QuantizationError", c.name() + "_some_rows", [=](Operands& o) {
      std::vector<double> rows(static_cast<size_t>(c.rows), 0.0);
      for (size_t i = 0; i < rows.size(); ++i) rows[i] = i % 3 == 0 || i < 40 ? -1.0 : 0.0;  // all rows of some blocks
      const Tensor x = wide_input(o, c.rows, c.cols, c.spread);
      const QuantizedTensor q = quantized_input(o, c.rows, c.cols, c.how, c.spread);
      o.device().run(QuantizationError{.x = x, .q = q, .out = error_output(o), .rows = o.given(Dtype::i32, {c.rows}, rows)});
    });
    add("FakeQuantize", c.name(), [=](Operands& o) {
      if (c.how.rule == ScaleRule::flashinfer && o.dtype() != Dtype::bf16) return;
      const Tensor x = wide_input(o, c.rows, c.cols, std::min(c.spread, 100));
      o.device().run(FakeQuantize{.x = x, .out = o.output("out", {c.rows, c.cols}, kExact), .how = c.how});
    });
    if (!c.how.rowwise() || c.how.rule == ScaleRule::flashinfer) continue;
    if (!is_four_bit(c.how.format)) {
      add("RequantizeColumns", c.name(), [=](Operands& o) {
        const QuantizedTensor x = quantized_input(o, c.rows, c.cols, c.how, c.spread);
        const QuantizedTensor out = quantized_output(o, "codes", "scales", {c.rows, c.cols}, c.how.transposed());
        o.device().run(RequantizeColumns{.x = x, .out = out});
      });
    }
    for (const bool columns : {false, true}) {
      if (columns && c.how.format == Format::nvfp4) continue;
      add("SwizzleScales", c.name() + (columns ? "_columns" : "_rows"), [=](Operands& o) {
        const QuantizedTensor x = quantized_input(o, c.rows, c.cols, columns ? c.how.transposed() : c.how, c.spread);
        const int64_t outer = columns ? c.cols : c.rows, inner = ceil_div(columns ? c.rows : c.cols, c.how.block());
        const Shape bytes{swizzled_bytes(outer, inner)};
        o.device().run(SwizzleScales{.x = x, .out = o.output_of(Dtype::u8, "out", bytes, kExact)});
      });
    }
  }
}

}  // namespace mantissa::test
