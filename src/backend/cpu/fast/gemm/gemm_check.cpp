#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/gemm/packed_gemm.h"
#include "base/parallel.h"
#include "mantissa/base/rng.h"
#include "mantissa/base/text.h"
#include "mantissa/formats/bf16.h"

namespace mantissa {
namespace {

// Draws numbers whose sums are rounded at every step: magnitudes differ by 2^12.
float drawn(uint32_t what, int64_t index) {
  const auto words = random_words({.seed = 1, .stream = RngStream::test}, what, static_cast<uint64_t>(index));
  const float unit = static_cast<float>(static_cast<int32_t>(words[0])) * 0x1p-31F;
  return to_float(to_bf16(std::ldexp(unit, static_cast<int>(words[1] % 13U) - 6)));
}

// Makes rows of a, or columns of b, that are all the same.
std::vector<float> operand(int64_t rows, int64_t cols, uint32_t what, bool same_rows, bool same_columns) {
  std::vector<float> out(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      out[static_cast<size_t>(i * cols + j)] = drawn(what, same_rows ? j : same_columns ? i : i * cols + j);
    }
  }
  return out;
}

// Returns the sums of two GEMMs in a row, of operands of so much depth: the second one adds to the sums of the first.
std::vector<float> sums_of(const PackedGemm& gemm, Alike alike, int64_t depth) {
  const TileShape& shape = gemm.shape();
  const std::vector<float> a = operand(shape.rows, depth, 0, alike == Alike::rows, false),
                           b = operand(depth, shape.cols, 1, false, alike == Alike::columns);
  std::vector<bf16> rounded;
  // Converts to the dtype of the tile, in memory that lasts until the next call.
  const auto block = [&](const std::vector<float>& values, int64_t rows, int64_t cols) {
    const bool narrow = gemm.dtype() == Dtype::bf16;
    rounded.clear();
    for (const float value : values) rounded.push_back(to_bf16(value));
    const auto* data = narrow ? reinterpret_cast<const std::byte*>(rounded.data()) : reinterpret_cast<const std::byte*>(values.data());
    return Block{.data = data, .dtype = gemm.dtype(), .ld = cols, .rows = rows, .cols = cols, .transposed = false};
  };
  std::vector<float> out(static_cast<size_t>(gemm.sums()));
  parallel_for(1, 1, Subnormals::flushed, [&](int64_t, int64_t) {
    TileWorker worker(gemm);
    AlignedBytes a_bytes, b_bytes, sums_bytes;
    std::byte *const packed_a = a_bytes.at_least(gemm.a_bytes()), *const packed_b = b_bytes.at_least(gemm.b_bytes());
    gemm.pack_a(block(a, shape.rows, depth), packed_a);
    gemm.pack_b(block(b, depth, shape.cols), packed_b);
    auto* const sums = reinterpret_cast<float*>(sums_bytes.at_least(gemm.sums() * 4));
    for (const bool accumulate : {false, true}) worker.run(packed_a, packed_b, accumulate, sums);
    std::copy_n(sums, gemm.sums(), out.data());
  });
  return out;
}

}  // namespace

int64_t unequal_lines(std::span<const float> sums, int64_t cols, Alike alike) {
  const int64_t rows = std::ssize(sums) / cols;
  const bool by_row = alike == Alike::rows;
  const int64_t lines = by_row ? rows : cols, step = by_row ? cols : 1, elements = by_row ? cols : rows, stride = by_row ? 1 : cols;
  const auto differs = [&](int64_t line) {
    for (int64_t i = 0; i < elements; ++i) {
      const auto first = static_cast<size_t>(i * stride), here = static_cast<size_t>(line * step + i * stride);
      if (std::bit_cast<uint32_t>(sums[first]) != std::bit_cast<uint32_t>(sums[here])) return true;
    }
    return false;
  };
  int64_t unequal = 0;
  for (int64_t line = 1; line < lines; ++line) unequal += differs(line);
  return unequal;
}

std::string unequal_places(const PackedGemm& gemm) {
  std::string out;
  for (const Alike alike : {Alike::rows, Alike::columns}) {
    const auto [rows, cols, depth] = gemm.shape();
    const std::vector<float> sums = sums_of(gemm, alike, depth);
    const bool by_row = alike == Alike::rows;
    const int64_t unequal = unequal_lines(sums, cols, alike);
    if (unequal == 0) continue;
    out +=
        text(out.empty() ? "" : "; ", gemm.dtype(), by_row ? ", rows: " : ", columns: ", unequal, " of ", by_row ? rows : cols, " differ");
  }
  return out;
}

std::string unequal_depths(const PackedGemms& gemms) {
  const auto& [whole, half] = gemms;
  const int64_t depth = half.shape().depth;
  const std::vector<float> one = sums_of(half, Alike::rows, depth), other = sums_of(whole, Alike::rows, depth);
  if (std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0) return "";
  return text(half.dtype(), ", depths ", depth, " and ", whole.shape().depth, " differ");
}

std::string CpuBackend::unequal_places() const {
  std::string out;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    if (dtype == Dtype::bf16 && !onednn_has_bf16()) continue;
    const PackedGemms& gemms = packed_gemms(dtype);
    for (const std::string& found : {mantissa::unequal_places(gemms.whole), mantissa::unequal_places(gemms.half), unequal_depths(gemms)}) {
      if (!found.empty()) out += text(out.empty() ? "" : "; ", found);
    }
  }
  return out;
}

}  // namespace mantissa
