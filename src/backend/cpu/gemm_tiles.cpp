#include "backend/cpu/gemm_tiles.h"

#include <cstring>
#include <vector>

#include "backend/cpu/clones.h"
#include "backend/cpu/simd.h"
#include "backend/cpu/widened_gemm.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

// Tiles that one thread computes. It packs the operands that they share, so many tiles cost little packing; their sums stay in its cache.
struct Task {
  const TiledProduct* product;
  int64_t row, row_tiles;
  int64_t col, col_tiles;
};
constexpr int64_t kMostSums = 16 * 64 * 128, kMostRowTiles = 8;

struct Sums {
  const float* from;  // of a tile, `ld` a row
  int64_t ld;
  int64_t rows, cols;  // of which so many count
};

template <class Out>
[[gnu::always_inline]] inline void store_rows(const Sums& sums, const float* bias, bool accumulate, Out* out, int64_t out_ld) {
  for (int64_t i = 0; i < sums.rows; ++i) {
    const float* from = sums.from + i * sums.ld;
    Out* to = out + i * out_ld;
    simd::for_lanes(
        sums.cols, [&](int64_t j, auto part) __attribute__((always_inline)) {
          simd::Floats value = simd::load(from + j, part) + simd::load(bias + j, part);
          if (accumulate) value += simd::load(to + j, part);
          simd::store(to + j, value, part);
        });
  }
}

// The bias of columns [first, first + cols), or zeros.
void load_bias(const TiledProduct& product, int64_t first, int64_t cols, float* to) {
  std::fill_n(to, cols, 0.0F);
  if (!product.bias) return;
  const Tensor& bias = *product.bias;
  for (int64_t j = 0; j < cols; ++j) {
    const int64_t i = product.first_bias + first + j;
    to[j] = bias.dtype() == Dtype::bf16 ? to_float(bias.device_data<bf16>()[i]) : bias.device_data<float>()[i];
  }
}

int64_t tiles_of(const TiledProduct& product, const TileShape& tile) {
  return ceil_div(product.a.rows, tile.rows) * ceil_div(product.b.cols, tile.cols);
}

// At least so many tasks, as far as there are tiles. Those that read the same part of b follow each other.
void cut(const TiledProduct& product, const PackedProduct& tile, int64_t least, std::vector<Task>& tasks) {
  const int64_t tile_rows = tile.shape().rows, tile_cols = tile.shape().cols;
  const int64_t rows = ceil_div(product.a.rows, tile_rows), cols = ceil_div(product.b.cols, tile_cols);
  if (rows == 0 || cols == 0) return;
  int64_t height = std::min(kMostRowTiles, rows), width = std::max<int64_t>(1, kMostSums / (height * tile.sums()));
  const auto tasks_of = [&] { return ceil_div(rows, height) * ceil_div(cols, width); };
  while (height * width > 1 && tasks_of() < least) (width > 1 ? width : height) /= 2;
  const int64_t down = ceil_div(rows, height), across = ceil_div(cols, width);
  for (int64_t j = 0; j < across; ++j) {
    for (int64_t i = 0; i < down; ++i) {
      const int64_t row = i * rows / down, col = j * cols / across;
      tasks.push_back({.product = &product,
                       .row = row * tile_rows,
                       .row_tiles = (i + 1) * rows / down - row,
                       .col = col * tile_cols,
                       .col_tiles = (j + 1) * cols / across - col});
    }
  }
}

// The memory of one task: tiles of sums, packed tiles of a and b.
struct Workspace {
  Workspace(AlignedBytes& memory, const Task& task, const PackedProduct& product) : tile(product), row_tiles(task.row_tiles) {
    const int64_t all = task.row_tiles * task.col_tiles * tile.sums(), a_bytes = task.row_tiles * tile.a_bytes();
    all_sums = {reinterpret_cast<float*>(memory.at_least(all * 4 + a_bytes + tile.b_bytes())), static_cast<size_t>(all)};
    all_a = reinterpret_cast<std::byte*>(all_sums.data() + all);
    b = all_a + a_bytes;
    std::ranges::fill(all_sums, 0.0F);
  }
  float* sums(int64_t i, int64_t j) const { return all_sums.data() + (j * row_tiles + i) * tile.sums(); }
  std::byte* a(int64_t i) const { return all_a + i * tile.a_bytes(); }

  const PackedProduct& tile;
  int64_t row_tiles;
  std::span<float> all_sums;
  std::byte *all_a, *b;
};

void multiply(const Task& task, const PackedProduct& tile, const Workspace& work) {
  const auto [rows, cols, depth] = tile.shape();
  const TiledProduct& product = *task.product;
  TileWorker& worker = tile_worker(tile.dtype());
  for (int64_t k = 0; k < product.a.cols; k += depth) {
    for (int64_t i = 0; i < task.row_tiles; ++i) worker.pack_a(product.a.part(task.row + i * rows, k, rows, depth), work.a(i));
    for (int64_t j = 0; j < task.col_tiles; ++j) {
      worker.pack_b(product.b.part(k, task.col + j * cols, depth, cols), work.b);
      for (int64_t i = 0; i < task.row_tiles; ++i) worker.add(work.a(i), work.b, work.sums(i, j));
    }
  }
}

// Writes the tile of sums whose first element belongs at (row, col) of the output.
void finish(const TiledProduct& product, const TileShape& shape, int64_t row, int64_t col, const float* sums) {
  thread_local std::vector<float> bias;
  bias.resize(static_cast<size_t>(shape.cols));
  const Sums tile{.from = sums,
                  .ld = shape.cols,
                  .rows = std::min(shape.rows, product.a.rows - row),
                  .cols = std::min(shape.cols, product.b.cols - col)};
  load_bias(product, col, tile.cols, bias.data());
  std::byte* const out = product.out + (row * product.out_ld + col) * dtype_bytes(product.out_dtype);
  if (product.out_dtype == Dtype::bf16) {
    cloned<store_rows<bf16>>(tile, bias.data(), product.accumulate, reinterpret_cast<bf16*>(out), product.out_ld);
  } else {
    cloned<store_rows<float>>(tile, bias.data(), product.accumulate, reinterpret_cast<float*>(out), product.out_ld);
  }
}

void run(const Task& task, const PackedProduct& tile) {
  thread_local AlignedBytes memory;
  const Workspace work(memory, task, tile);
  multiply(task, tile, work);
  const TileShape& shape = tile.shape();
  for (int64_t i = 0; i < task.row_tiles; ++i) {
    for (int64_t j = 0; j < task.col_tiles; ++j) {
      finish(*task.product, shape, task.row + i * shape.rows, task.col + j * shape.cols, work.sums(i, j));
    }
  }
}

}  // namespace

Block block(const Tensor& tensor, bool transposed) {
  const int64_t rows = tensor.dim(0), cols = tensor.dim(1);
  return {.data = tensor.device_bytes(),
          .dtype = tensor.dtype(),
          .ld = cols,
          .rows = transposed ? cols : rows,
          .cols = transposed ? rows : cols,
          .transposed = transposed};
}

Tensor dense(const Value& value, Dtype dtype, const Tensor& extreme) {
  return std::holds_alternative<Tensor>(value) ? std::get<Tensor>(value) : high_precision(value, dtype, extreme);
}

bool is_set(const Tensor& extreme) { return extreme.defined() && *extreme.device_data<int32_t>() != 0; }

void multiply(Dtype dtype, Subnormals subnormals, std::span<const TiledProduct> products) {
  const PackedProduct& tile = packed_product(dtype);
  std::vector<Task> tasks;
  int64_t all = 0;
  for (const TiledProduct& product : products) all += tiles_of(product, tile.shape());
  // Two for each thread, so that they finish together.
  for (const TiledProduct& product : products) {
    cut(product, tile, ceil_div(int64_t{2} * num_threads() * tiles_of(product, tile.shape()), std::max<int64_t>(1, all)), tasks);
  }
  parallel_for(std::ssize(tasks), 1, subnormals, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) run(tasks[static_cast<size_t>(t)], tile);
  });
}

}  // namespace mantissa
