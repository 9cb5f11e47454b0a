// The quantising kernels against a memory copy: bytes are those read plus those written.
#include "bench_harness.h"
#include "mantissa/backend/functions.h"
#include "mantissa/formats/swizzle.h"

namespace mantissa::tools {
namespace {

constexpr int64_t kRows = 16384, kCols = 2048;

template <class Kernel>
std::function<void()> runner(Backend& device, Kernel kernel) {
  return [&device, kernel] { device.run(kernel); };
}

Tensor normal_values(Backend& device) {
  const Tensor drawn = empty(device, Dtype::f32, {kRows, kCols});
  device.run(RandomNormal{.out = drawn, .key = {.seed = 1, .stream = RngStream::test}, .what = 0, .first_index = 0, .std = 1.0});
  return converted(drawn, Dtype::bf16);
}

}  // namespace

void add_quantized(std::vector<Workload>& out, Backend& device, Dtype dtype) {
  if (dtype != Dtype::bf16) return;  // what is quantised is always bf16
  const Tensor x = normal_values(device), y = empty_like(x);
  const auto add = [&](const char* name, int64_t bytes, std::function<void()> run) {
    out.push_back(
        {.bench = name, .shape = text(kRows, "x", kCols), .dtype = dtype, .bytes = static_cast<double>(bytes), .run = std::move(run)});
  };
  const Quantization rows{Format::e4m3, 1, 32}, tiles{Format::e4m3, 32, 32}, fake{Format::e2m1, 1, 32, ScaleRule::flashinfer};
  const QuantizedTensor row = quantized(x, rows), column = quantized(x, rows.transposed()), tile = quantized(x, tiles),
                        packed = quantized(x, fake);
  add("kernel.quantize_row", x.bytes() + row.bytes(), runner(device, Quantize{.x = x, .out = row}));
  add("kernel.quantize_column", x.bytes() + column.bytes(), runner(device, Quantize{.x = x, .out = column}));
  add("kernel.quantize_both", x.bytes() + row.bytes() + column.bytes(), runner(device, Quantize{.x = x, .out = row, .second = column}));
  add("kernel.quantize_tiles", x.bytes() + tile.bytes(), runner(device, Quantize{.x = x, .out = tile}));
  add("kernel.quantize_e2m1", x.bytes() + packed.bytes(), runner(device, Quantize{.x = x, .out = packed}));
  add("kernel.dequantize_row", y.bytes() + row.bytes(), runner(device, Dequantize{.x = row, .out = y}));
  add("kernel.dequantize_tiles", y.bytes() + tile.bytes(), runner(device, Dequantize{.x = tile, .out = y}));
  add("kernel.dequantize_e2m1", y.bytes() + packed.bytes(), runner(device, Dequantize{.x = packed, .out = y}));
  add("kernel.requantize_columns", row.bytes() + column.bytes(), runner(device, RequantizeColumns{.x = row, .out = column}));
  add("kernel.fake_quantize", x.bytes() + y.bytes(), runner(device, FakeQuantize{.x = x, .out = y, .how = fake}));
  const Tensor swizzled = empty(device, Dtype::u8, {swizzled_bytes(kRows, kCols / 32)});
  add("kernel.swizzle_scales", row.scales.bytes() + swizzled.bytes(), runner(device, SwizzleScales{.x = row, .out = swizzled}));
}

}  // namespace mantissa::tools
