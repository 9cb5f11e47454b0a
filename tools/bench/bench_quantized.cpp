// The quantizing kernels against a memory copy.
#include "mantissa/formats/swizzle.h"
#include "tools/bench/bench_operands.h"

namespace mantissa::tools {

void add_quantized(std::vector<Workload>& out, Backend& device, Dtype dtype) {
  if (dtype != Dtype::bf16) return;  // only bf16 is quantized
  constexpr int64_t kRows = 16384, kCols = 2048;
  BenchOperands o(device, dtype);
  const Tensor x = o.values({kRows, kCols}), y = empty_like(x);
  const auto add = [&](const char* name, const auto& k) { out.push_back(o.workload(name, text(kRows, "x", kCols), k)); };
  const Quantization rows{Format::e4m3, 1, 32}, tiles{Format::e4m3, 32, 32}, fake{Format::e2m1, 1, 32, ScaleRule::flashinfer};
  const QuantizedTensor row = quantized(x, rows), column = quantized(x, rows.transposed()), tile = quantized(x, tiles),
                        packed = quantized(x, fake);
  add("kernel.quantize_row", Quantize{.x = x, .out = row});
  add("kernel.quantize_column", Quantize{.x = x, .out = column});
  add("kernel.quantize_both", Quantize{.x = x, .out = row, .second = column});
  add("kernel.quantize_tiles", Quantize{.x = x, .out = tile});
  add("kernel.quantize_e2m1", Quantize{.x = x, .out = packed});
  add("kernel.dequantize_row", Dequantize{.x = row, .out = y});
  add("kernel.dequantize_tiles", Dequantize{.x = tile, .out = y});
  add("kernel.dequantize_e2m1", Dequantize{.x = packed, .out = y});
  add("kernel.requantize_columns", RequantizeColumns{.x = row, .out = column});
  add("kernel.fake_quantize", FakeQuantize{.x = x, .out = y, .how = fake});
  const Tensor swizzled = empty(device, Dtype::u8, {swizzled_bytes(kRows, kCols / 32)});
  add("kernel.swizzle_scales", SwizzleScales{.x = row, .out = swizzled});
  out.back().bytes = static_cast<double>(row.scales.bytes() + swizzled.bytes());  // codes are not looked at
}

}  // namespace mantissa::tools
