#include <algorithm>
#include <array>
#include <cstring>

#include "backend/cpu/clones.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm_engine.h"
#include "backend/cpu/gemm_tiles.h"
#include "backend/cpu/widened_gemm.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

// Rows of a tile: as many as possible, because each tile copies b anew, but at least four tiles in an even number, so that two or four
// cores finish together. Many tiles balance by themselves.
int64_t tile_rows(int64_t rows, int64_t column_tiles) {
  for (const int64_t step : {256, 192, 128, 96, 64}) {
    const int64_t tiles = ceil_div(rows, step) * column_tiles;
    if (tiles >= 16 || (tiles >= 4 && tiles % 2 == 0)) return std::min(step, rows);
  }
  return std::min<int64_t>(rows, 64);
}

// out [rows, depth] = in [depth, ld] columns [0, rows) transposed, in blocks that fit the L1 cache.
template <class T>
[[gnu::always_inline]] inline void transpose(const T* in, int64_t ld, int64_t rows, int64_t depth, T* out) {
  constexpr int64_t kBlock = 16;
  for (int64_t k0 = 0; k0 < depth; k0 += kBlock) {
    const int64_t k1 = std::min(depth, k0 + kBlock);
    for (int64_t r0 = 0; r0 < rows; r0 += kBlock) {
      const int64_t r1 = std::min(rows, r0 + kBlock);
      for (int64_t r = r0; r < r1; ++r) {
        for (int64_t k = k0; k < k1; ++k) out[r * depth + k] = in[k * ld + r];
      }
    }
  }
}

[[gnu::always_inline]] inline void transpose_range(const void* in, int64_t ld, int64_t rows, int64_t depth, int64_t element_bytes,
                                                   void* out) {
  if (element_bytes == 2) {
    transpose(static_cast<const uint16_t*>(in), ld, rows, depth, static_cast<uint16_t*>(out));
  } else {
    transpose(static_cast<const uint32_t*>(in), ld, rows, depth, static_cast<uint32_t*>(out));
  }
}

// Columns of the output whose part of a quantised b is dequantised at a time: whole tiles of about 8 MiB. A transposed a is packed
// anew for each band, and a sum cannot start over: there b is taken whole.
int64_t band_columns(const Gemm& k, int64_t col_step, Dtype dtype) {
  constexpr int64_t kBandBytes = int64_t{1} << 23;
  const auto* b = std::get_if<QuantizedTensor>(&k.b.value);
  if (!b || k.a.transposed || k.accumulate) return k.out.dim(1);
  if (col_step % (k.b.transposed ? b->how.block_rows : b->how.block_cols) != 0) return k.out.dim(1);
  return std::max<int64_t>(1, kBandBytes / (k.b.rows() * col_step * dtype_bytes(dtype))) * col_step;
}

}  // namespace

struct GemmEngine::Problem {
  const Gemm& k;
  Tensor a, b;  // op(a) whole, of op(b) the columns [first, first + cols)
  int64_t rows, first, cols, depth;
  int64_t row_step, col_step;

  // A short last tile has a shape of its own: index 1.
  TileShape tile(bool last_row, bool last_col) const {
    const int64_t row_rest = rows - (ceil_div(rows, row_step) - 1) * row_step, col_rest = cols - (ceil_div(cols, col_step) - 1) * col_step;
    return {.rows = last_row ? row_rest : row_step,
            .cols = last_col ? col_rest : col_step,
            .depth = depth,
            .lda = depth,
            .ldb = b.dim(1),
            .ldc = k.out.dim(1),
            .in = a.dtype(),
            .out = k.out.dtype(),
            .b_transposed = k.b.transposed,
            .accumulate = k.accumulate,
            .bias = k.bias.defined()};
  }
};

const TileProduct& GemmEngine::product(const TileShape& shape) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<TileProduct>& entry = products_[shape];
  // Created with the library at one thread, as it will run: the number of threads at creation decides how it splits the work.
  if (!entry) parallel_for(1, 1, [&](int64_t, int64_t) { entry = make_tile_product(shape); });
  return *entry;
}

void GemmEngine::run_tiles(const Problem& p) {
  const Gemm& k = p.k;
  const int64_t row_tiles = ceil_div(p.rows, p.row_step), col_tiles = ceil_div(p.cols, p.col_step);
  std::array<const TileProduct*, 4> products{};
  for (const bool last_row : {false, true}) {
    for (const bool last_col : {false, true}) {
      products[static_cast<size_t>(2 * last_row + last_col)] = &product(p.tile(last_row, last_col));
    }
  }
  const int64_t a_bytes = dtype_bytes(p.a.dtype());
  const auto run_tile = [&](int64_t i, int64_t j, const void* a) {
    const int64_t col = j * p.col_step;
    products[static_cast<size_t>(2 * (i + 1 == row_tiles) + (j + 1 == col_tiles))]->run(
        a, at(p.b, k.b.transposed ? col * p.depth : col), at(k.out, i * p.row_step * k.out.dim(1) + p.first + col),
        k.bias.defined() ? at(k.bias, p.first + col) : nullptr);
  };
  if (!k.a.transposed) {
    // Tiles of one column of tiles follow each other: they read the same part of b.
    parallel_for(row_tiles * col_tiles, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t i = t % row_tiles, j = t / row_tiles;
        run_tile(i, j, at(p.a, i * p.row_step * p.depth));
      }
    });
    return;
  }
  parallel_for(row_tiles, 1, [&](int64_t begin, int64_t end) {
    thread_local std::vector<uint32_t> packed;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t rows = std::min(p.row_step, p.rows - i * p.row_step);
      const auto words = static_cast<size_t>(ceil_div(rows * p.depth * a_bytes, 4));
      if (packed.size() < words) packed.resize(words);
      cloned<transpose_range>(at(p.a, i * p.row_step), p.rows, rows, p.depth, a_bytes, packed.data());
      for (int64_t j = 0; j < col_tiles; ++j) run_tile(i, j, packed.data());
    }
  });
}

// Returns false, with out half written, if a dequantised operand is not exact in bf16.
bool GemmEngine::run_bands(const Gemm& k, Dtype dtype, Backend& device) {
  const int64_t rows = k.a.rows(), depth = k.a.cols(), cols = k.out.dim(1);
  if (rows == 0 || cols == 0) return true;
  const int64_t col_step = tile_columns(cols, depth, k.b.transposed), band = band_columns(k, col_step, dtype);
  const int64_t row_step = tile_rows(rows, k.a.transposed ? 1 : ceil_div(cols, col_step));
  const Tensor extreme = dtype == Dtype::bf16 && (k.a.quantized() || k.b.quantized()) ? zeros(device, Dtype::i32, {1}) : Tensor();
  const Tensor a = high_precision(k.a.value, dtype, extreme);
  for (int64_t first = 0; first < cols; first += band) {
    const int64_t width = std::min(band, cols - first);
    const Tensor b = width == cols ? high_precision(k.b.value, dtype, extreme) : dequantized_band(k.b, dtype, first, width, extreme);
    if (extreme.defined() && is_set(extreme)) return false;
    run_tiles({.k = k,
               .a = a,
               .b = b,
               .rows = rows,
               .first = first,
               .cols = width,
               .depth = depth,
               .row_step = row_step,
               .col_step = std::min(col_step, width)});  // the last band may be narrower than a tile
  }
  return true;
}

// Widening bf16 is exact, and so is dequantising to bf16 unless a scale is extreme: each path gives the product of the values.
void GemmEngine::run(const Gemm& k, Backend& device) {
  if (onednn_has_bf16() && !is_fp32(k.a) && !is_fp32(k.b) && !is_fp32(k.bias)) {
    if (run_bands(k, Dtype::bf16, device)) return;
    ++fp32_products_;
  }
  multiply_widened(device, k, Dtype::f32, [&](const Gemm& wide) { run_bands(wide, Dtype::f32, device); });
}

CpuBackend::CpuBackend() : gemm_(std::make_unique<GemmEngine>()) {
  cpu_level();  // a wrong MANTISSA_MAX_CPU_LEVEL is an error here and not of the first kernel
}
CpuBackend::~CpuBackend() = default;

int64_t CpuBackend::fp32_products() const { return gemm_->fp32_products(); }

void CpuBackend::execute(const Gemm& k) {
  const bool fast = k.out.dim(0) > 0 && k.a.cols() > 0;
  // A bf16 sum into a bf16 output would be rounded twice; the reference rounds once.
  if (!fast || (k.accumulate && k.out.dtype() == Dtype::bf16)) return CpuReference::execute(k);
  gemm_->run(k, *this);
}

}  // namespace mantissa
