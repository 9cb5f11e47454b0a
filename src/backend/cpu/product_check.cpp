#include "backend/cpu/product_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm_engine.h"
#include "mantissa/base/parallel.h"
#include "mantissa/base/rng.h"
#include "mantissa/base/text.h"
#include "mantissa/formats/bf16.h"

namespace mantissa {
namespace {

// Numbers whose sums are rounded at every step: magnitudes differ by 2^12.
float drawn(uint32_t what, int64_t index) {
  const auto words = random_words({.seed = 1, .stream = RngStream::test}, what, static_cast<uint64_t>(index));
  const float unit = static_cast<float>(static_cast<int32_t>(words[0])) * 0x1p-31F;
  return to_float(to_bf16(std::ldexp(unit, static_cast<int>(words[1] % 13U) - 6)));
}

// Rows of a, or columns of b, that are all the same.
std::vector<float> operand(int64_t rows, int64_t cols, uint32_t what, bool same_rows, bool same_columns) {
  std::vector<float> out(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      out[static_cast<size_t>(i * cols + j)] = drawn(what, same_rows ? j : same_columns ? i : i * cols + j);
    }
  }
  return out;
}

class Tile {
 public:
  Tile(const PackedProduct& product, Alike alike) : product_(product), shape_(product.shape()) {
    a_ = operand(shape_.rows, shape_.depth, 0, alike == Alike::rows, false);
    b_ = operand(shape_.depth, shape_.cols, 1, false, alike == Alike::columns);
  }

  // Two products in a row: the second one adds to the sums of the first.
  std::vector<float> sums() const {
    std::vector<float> out(static_cast<size_t>(product_.sums()));
    parallel_for(1, 1, Subnormals::flushed, [&](int64_t, int64_t) {
      TileWorker worker(product_);
      AlignedBytes a, b, sums;
      std::byte* const packed_a = a.at_least(product_.a_bytes());
      std::byte* const packed_b = b.at_least(product_.b_bytes());
      worker.pack_a(block(a_, shape_.rows, shape_.depth), packed_a);
      worker.pack_b(block(b_, shape_.depth, shape_.cols), packed_b);
      auto* const c = reinterpret_cast<float*>(sums.at_least(product_.sums() * 4));
      std::fill_n(c, product_.sums(), 0.0F);
      for (int repeat = 0; repeat < 2; ++repeat) worker.add(packed_a, packed_b, c);
      std::copy_n(c, product_.sums(), out.data());
    });
    return out;
  }

 private:
  // In the dtype of the tile, in memory that lasts until the next call.
  Block block(const std::vector<float>& values, int64_t rows, int64_t cols) const {
    thread_local std::vector<bf16> rounded;
    const bool narrow = product_.dtype() == Dtype::bf16;
    rounded.clear();
    for (const float value : values) rounded.push_back(to_bf16(value));
    const auto* data = narrow ? reinterpret_cast<const std::byte*>(rounded.data()) : reinterpret_cast<const std::byte*>(values.data());
    return {.data = data, .dtype = product_.dtype(), .ld = cols, .rows = rows, .cols = cols, .transposed = false};
  }

  const PackedProduct& product_;
  TileShape shape_;
  std::vector<float> a_, b_;
};

}  // namespace

int64_t unequal_lines(std::span<const float> sums, int64_t cols, Alike alike) {
  const int64_t rows = std::ssize(sums) / cols;
  const bool by_row = alike == Alike::rows;
  const int64_t lines = by_row ? rows : cols, step = by_row ? cols : 1, elements = by_row ? cols : rows, stride = by_row ? 1 : cols;
  const auto differs = [&](int64_t line) {
    for (int64_t i = 0; i < elements; ++i) {
      const auto first = static_cast<size_t>(i * stride), here = static_cast<size_t>(line * step + i * stride);
      if (std::memcmp(&sums[first], &sums[here], sizeof(float)) != 0) return true;
    }
    return false;
  };
  int64_t unequal = 0;
  for (int64_t line = 1; line < lines; ++line) unequal += differs(line);
  return unequal;
}

std::string unequal_places(const PackedProduct& product) {
  std::string out;
  for (const Alike alike : {Alike::rows, Alike::columns}) {
    const std::vector<float> sums = Tile(product, alike).sums();
    const auto [rows, cols, depth] = product.shape();
    const bool by_row = alike == Alike::rows;
    const int64_t unequal = unequal_lines(sums, cols, alike);
    if (unequal == 0) continue;
    out += text(out.empty() ? "" : "; ", product.dtype(), by_row ? ", rows: " : ", columns: ", unequal, " of ", by_row ? rows : cols,
                " differ");
  }
  return out;
}

std::string CpuBackend::unequal_places() const {
  std::string out = mantissa::unequal_places(packed_product(Dtype::f32));
  if (!onednn_has_bf16()) return out;
  const std::string narrow = mantissa::unequal_places(packed_product(Dtype::bf16));
  if (!out.empty() && !narrow.empty()) out += "; ";
  return out + narrow;
}

}  // namespace mantissa
