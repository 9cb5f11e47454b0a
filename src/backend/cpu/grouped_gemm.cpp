#include <cstring>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/gemm_engine.h"
#include "backend/cpu/gemm_tiles.h"
#include "backend/cpu/groups.h"
#include "backend/cpu/widened_gemm.h"
#include "mantissa/backend/ceilings.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

struct Tile {
  int64_t matrix;     // of the b at hand
  int64_t row, rows;  // what the group has of it
  int64_t computed;   // rows with those it is filled up with
  int64_t col;
};

// Rows of the next tile of a group that has so many left: only such in which a row has the same bits wherever it is, and as many as
// possible, because each tile copies its part of b anew. oneDNN's AVX-512 kernels treat all rows of more than a few alike, its AVX2 kernels
// do not in the last rows of 128 or 256.
int64_t tile_height(int64_t rows) {
  if (onednn_has_avx512()) return std::min<int64_t>(round_up(rows, 32), 256);
  return rows > 128 ? 192 : 64;
}

// Memory of a thread that lasts.
std::byte* scratch(std::vector<uint32_t>& memory, int64_t bytes) {
  const auto words = static_cast<size_t>(ceil_div(bytes, 4));
  if (memory.size() < words) memory.resize(words);
  return reinterpret_cast<std::byte*>(memory.data());
}

}  // namespace

int64_t grouped_rows(int64_t rows) {
  int64_t out = 0;
  while (out < rows) out += tile_height(rows - out);
  return out;
}

struct GemmEngine::GroupProblem {
  const GroupedGemm& k;
  Tensor a;               // of rows that belong to a group
  std::vector<Tensor> b;  // matrices as they are stored
  std::vector<Tile> tiles;
  int64_t cols, depth, col_step;

  int64_t width(const Tile& tile) const { return std::min(col_step, cols - tile.col); }

  // An output without gaps between its rows, be it scratch: the library is faster by a tenth, and sums in another order than with gaps.
  TileShape shape(const Tile& tile) const {
    return {.rows = tile.computed,
            .cols = width(tile),
            .depth = depth,
            .lda = depth,
            .ldb = b.front().dim(1),
            .ldc = width(tile),
            .in = a.dtype(),
            .out = k.out.dtype(),
            .b_transposed = k.b.transposed,
            .accumulate = false,
            .bias = false};
  }

  void add_tiles(int64_t matrix, Group group) {
    for (int64_t col = 0; col < cols; col += col_step) {  // tiles that read the same part of b follow each other
      for (int64_t row = group.begin, height = 0; row < group.end; row += height) {
        height = tile_height(group.end - row);
        tiles.push_back({.matrix = matrix, .row = row, .rows = std::min(height, group.end - row), .computed = height, .col = col});
      }
    }
  }

  void run(const TileProduct& product, const Tile& tile) const {
    const void* part = at(b[static_cast<size_t>(tile.matrix)], k.b.transposed ? tile.col * depth : tile.col);
    const void* rows = tile.rows == tile.computed ? at(a, tile.row * depth) : filled_up(tile);
    std::byte* out = at(k.out, tile.row * cols + tile.col);
    if (tile.rows == tile.computed && width(tile) == cols) return product.run(rows, part, out, nullptr);
    thread_local std::vector<uint32_t> memory;
    const int64_t element = dtype_bytes(k.out.dtype()), bytes = width(tile) * element;
    std::byte* results = scratch(memory, tile.computed * bytes);
    product.run(rows, part, results, nullptr);
    for (int64_t i = 0; i < tile.rows; ++i) std::memcpy(out + i * cols * element, results + i * bytes, static_cast<size_t>(bytes));
  }

  // The rows of a tile, and zeros behind them.
  const std::byte* filled_up(const Tile& tile) const {
    thread_local std::vector<uint32_t> memory;
    const int64_t bytes = depth * dtype_bytes(a.dtype());
    std::byte* out = scratch(memory, tile.computed * bytes);
    std::memcpy(out, at(a, tile.row * depth), static_cast<size_t>(tile.rows * bytes));
    std::memset(out + tile.rows * bytes, 0, static_cast<size_t>((tile.computed - tile.rows) * bytes));
    return out;
  }
};

void GemmEngine::run_tiles(const GroupProblem& p) {
  std::vector<const TileProduct*> products;
  for (const Tile& tile : p.tiles) products.push_back(&product(p.shape(tile)));
  parallel_for(std::ssize(p.tiles), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) p.run(*products[static_cast<size_t>(t)], p.tiles[static_cast<size_t>(t)]);
  });
}

// Returns false, with out half written, if a dequantised operand is not exact in bf16.
bool GemmEngine::run_groups(const GroupedGemm& k, Dtype dtype, Backend& device) {
  // Matrices that are dequantised together: as few as make work for all cores.
  constexpr int64_t kMatrixBytes = int64_t{1} << 23;
  const Groups groups("grouped_gemm", k.offsets, k.out.dim(0));
  const int64_t stored = shape_of(k.b.value)[0] / groups.count(), cols = k.out.dim(1), depth = k.a.cols();
  const Tensor extreme = dtype == Dtype::bf16 && (k.a.quantized() || k.b.quantized()) ? zeros(device, Dtype::i32, {1}) : Tensor();
  const bool as_it_is = !k.b.quantized() && k.b.dense().dtype() == dtype;
  GroupProblem p{.k = k,
                 .a = high_precision(slice(k.a.value, 0, groups.end()), dtype, extreme),
                 .b = {},
                 .tiles = {},
                 .cols = cols,
                 .depth = depth,
                 .col_step = tile_columns(cols, depth, k.b.transposed)};
  const auto flush = [&] {
    if (extreme.defined() && is_set(extreme)) return false;
    if (!p.tiles.empty()) run_tiles(p);
    p.b.clear();
    p.tiles.clear();
    return true;
  };
  for (int64_t g = 0; g < groups.count(); ++g) {
    if (groups[g].rows() == 0) continue;
    p.b.push_back(high_precision(slice(k.b.value, g * stored, (g + 1) * stored), dtype, extreme));
    p.add_tiles(std::ssize(p.b) - 1, groups[g]);
    if (!as_it_is && std::ssize(p.b) * p.b.back().bytes() >= kMatrixBytes && !flush()) return false;
  }
  if (!flush()) return false;
  device.run(Fill{.out = k.out.slice(groups.end(), k.out.dim(0)), .value = 0.0});
  return true;
}

void GemmEngine::run(const GroupedGemm& k, Backend& device) {
  if (onednn_has_bf16() && !is_fp32(k.a) && !is_fp32(k.b)) {
    if (run_groups(k, Dtype::bf16, device)) return;
    ++fp32_products_;
  }
  multiply_widened(device, k, Dtype::f32, [&](const GroupedGemm& wide) { run_groups(wide, Dtype::f32, device); });
}

void CpuBackend::execute(const GroupedGemm& k) {
  if (k.out.dim(1) == 0 || k.a.cols() == 0) return CpuReference::execute(k);
  gemm_->run(k, *this);
}

}  // namespace mantissa
