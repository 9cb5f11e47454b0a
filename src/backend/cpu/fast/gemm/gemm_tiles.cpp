#include "backend/cpu/fast/gemm/gemm_tiles.h"

#include <xmmintrin.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "backend/cpu/fast/simd.h"
#include "backend/cpu/gemm_operands.h"
#include "backend/cpu/scalar.h"
#include "base/parallel.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

// The cut of a GEMM. The sum of a tile needs a row of tiles of a and a column of tiles of b, and both are packed before they are used:
//   - b by all threads once (`shared`), where the rows are more than those of one task; else by its task, a tile at a time,
//   - a by each task: as deep as it is, if that stays in a cache (`whole_depth`), so that the sums of a column of tiles are finished one
//     after the other; else a step of the depth at a time, with the sums of all tiles of the task.
struct Cut {
  bool shared, whole_depth;
  int64_t height, width;  // tiles of a task, at most
};
constexpr int64_t kMostRowTiles = 8, kMostSums = int64_t{16} * 64 * 128, kPackedABytes = int64_t{768} << 10;

// Bound the packed tiles of b that are shared at a time, and the columns of tiles that have to fit, at least: each column block of them
// packs a anew.
constexpr int64_t kSharedBytes = int64_t{8} << 20, kFewestShared = 4;

// A column block of tiles of a GEMM.
struct ColumnBlock {
  const TiledGemm* gemm;
  Cut cut;
  int64_t col, col_tiles;
  std::byte* packed_b = nullptr;  // tile (k, j) at (j * tiles of the depth + k) tiles, where it is shared
};

// The tiles that one thread computes.
struct Task {
  const ColumnBlock* block;
  int64_t row, row_tiles;
  int64_t col, col_tiles;  // from the first column of the column block
};

struct Sums {
  const float* from;  // a tile, `ld` elements a row
  int64_t ld;
  int64_t rows, cols;  // rows and columns of it that count
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

// Non-temporal stores spare the read of a line before it is written. They pay for an output that does not stay in a core's cache, as the
// gradients of weights.
constexpr int64_t kStreamedBytes = int64_t{4} << 20;

bool streamed(const TiledGemm& gemm) {
  const bool whole_vectors =
      (reinterpret_cast<uintptr_t>(gemm.out) | static_cast<uintptr_t>(gemm.out_ld * 4)) % sizeof(__m128) == 0 && gemm.b.cols % 4 == 0;
  return gemm.out_dtype == Dtype::f32 && !gemm.accumulate && whole_vectors && gemm.a.rows * gemm.b.cols * 4 >= kStreamedBytes;
}

// Writes four columns at a time, which divide those of a tile. Wider stores would wait for memory as well.
void stream_rows(const Sums& sums, const float* bias, float* out, int64_t out_ld) {
  for (int64_t i = 0; i < sums.rows; ++i) {
    const float* from = sums.from + i * sums.ld;
    for (int64_t j = 0; j < sums.cols; j += 4) _mm_stream_ps(out + i * out_ld + j, _mm_loadu_ps(from + j) + _mm_loadu_ps(bias + j));
  }
  _mm_sfence();
}

struct Tiles {
  int64_t rows, cols, depth;
};

Tiles tiles_of(const TiledGemm& gemm, const TileShape& tile) {
  return {ceil_div(gemm.a.rows, tile.rows), ceil_div(gemm.b.cols, tile.cols), ceil_div(gemm.a.cols, tile.depth)};
}

Cut cut_of(const Tiles& tiles, const PackedGemm& tile) {
  const int64_t row_bytes = tiles.depth * tile.a_bytes();
  Cut cut{};
  cut.shared = tiles.depth > 0 && tiles.rows > kMostRowTiles && kFewestShared * tiles.depth * tile.b_bytes() <= kSharedBytes;
  cut.height = std::min(kMostRowTiles, tiles.rows);
  if (cut.shared) cut.height = std::clamp<int64_t>(kPackedABytes / row_bytes, 1, kMostRowTiles);
  cut.whole_depth = cut.shared || cut.height * row_bytes <= kPackedABytes;
  cut.width = cut.whole_depth ? tiles.cols : std::max<int64_t>(1, kMostSums / (cut.height * tile.sums()));
  return cut;
}

// Says how many tasks a column block is cut into.
struct Grid {
  int64_t down, across;
};

// Estimates the time of so many threads for a column block, in multiplications of a tile. Packing a tile of a takes about a quarter of one,
// a tile of b half.
double time_of(const ColumnBlock& block, const Tiles& tiles, Grid grid, int64_t threads) {
  const auto height = static_cast<double>(ceil_div(tiles.rows, grid.down)),
             width = static_cast<double>(ceil_div(block.col_tiles, grid.across));
  const double packed = height / 4.0 + (block.cut.shared ? 0.0 : width / 2.0);
  return static_cast<double>(ceil_div(grid.down * grid.across, threads)) * (height * width + packed);
}

// Returns the fastest grid that gives each thread a task, as far as there are tiles.
Grid grid_of(const ColumnBlock& block, const Tiles& tiles, int64_t threads) {
  const Grid fewest{.down = ceil_div(tiles.rows, block.cut.height), .across = ceil_div(block.col_tiles, block.cut.width)};
  const int64_t least = std::min(threads, tiles.rows * block.col_tiles), most = 8 * threads;
  Grid best = fewest;
  double time = std::numeric_limits<double>::infinity();
  for (int64_t down = fewest.down; down <= tiles.rows && (down == fewest.down || down * fewest.across <= most); ++down) {
    for (int64_t across = fewest.across; across <= block.col_tiles && (down * across <= most || across == fewest.across); ++across) {
      const double here = time_of(block, tiles, {down, across}, threads);
      if (down * across >= least && here < time) best = {down, across}, time = here;
    }
  }
  return best;
}

// Orders tasks that read the same part of b behind each other.
void add_tasks(const ColumnBlock& block, const Tiles& tiles, int64_t threads, std::vector<Task>& tasks) {
  const auto [down, across] = grid_of(block, tiles, threads);
  for (int64_t j = 0; j < across; ++j) {
    for (int64_t i = 0; i < down; ++i) {
      const int64_t row = i * tiles.rows / down, col = j * block.col_tiles / across;
      tasks.push_back({.block = &block,
                       .row = row,
                       .row_tiles = (i + 1) * tiles.rows / down - row,
                       .col = col,
                       .col_tiles = (j + 1) * block.col_tiles / across - col});
    }
  }
}

// Returns the depth from step k on.
int64_t left(const ColumnBlock& block, const TileShape& tile, int64_t k) { return block.gemm->a.cols - k * tile.depth; }

// Packs tile (k, j) of the column block.
void pack_b(const ColumnBlock& block, const PackedGemms& tiles, int64_t k, int64_t j, std::byte* to) {
  const TileShape& tile = tiles.whole.shape();
  tiles.for_depth(left(block, tile, k)).pack_b(block.gemm->b.part(k * tile.depth, (block.col + j) * tile.cols, tile.depth, tile.cols), to);
}

// Writes the tile of sums whose first element belongs at (row, col) of the output.
void finish(const TiledGemm& gemm, const TileShape& shape, int64_t row, int64_t col, const float* sums) {
  thread_local std::vector<float> bias;
  bias.resize(static_cast<size_t>(shape.cols));
  const Sums tile{
      .from = sums, .ld = shape.cols, .rows = std::min(shape.rows, gemm.a.rows - row), .cols = std::min(shape.cols, gemm.b.cols - col)};
  load_bias(gemm.bias, gemm.first_bias + col, tile.cols, bias.data());
  std::byte* const out = gemm.out + (row * gemm.out_ld + col) * dtype_bytes(gemm.out_dtype);
  if (gemm.out_dtype == Dtype::bf16) {
    cloned<store_rows<bf16>>(tile, bias.data(), gemm.accumulate, reinterpret_cast<bf16*>(out), gemm.out_ld);
  } else if (streamed(gemm)) {
    stream_rows(tile, bias.data(), reinterpret_cast<float*>(out), gemm.out_ld);
  } else {
    cloned<store_rows<float>>(tile, bias.data(), gemm.accumulate, reinterpret_cast<float*>(out), gemm.out_ld);
  }
}

// Runs one task: its sums, its packed part of a, and a tile of b where b is not shared.
void run_task(const Task& task, const PackedGemms& tiles) {
  const ColumnBlock& block = *task.block;
  const PackedGemm& tile = tiles.whole;
  const TileShape& shape = tile.shape();
  TileWorkers& workers = tile_workers(tile.dtype());
  const int64_t depth = tiles_of(*block.gemm, shape).depth;
  const bool whole = block.cut.whole_depth;
  const int64_t elements = task.row_tiles * (whole ? 1 : task.col_tiles) * tile.sums();
  const int64_t a_bytes = task.row_tiles * (whole ? depth : 1) * tile.a_bytes();
  thread_local AlignedBytes memory;
  auto* const all_sums = reinterpret_cast<float*>(memory.at_least(elements * 4 + a_bytes + (block.cut.shared ? 0 : tile.b_bytes())));
  auto* const all_a = reinterpret_cast<std::byte*>(all_sums + elements);
  std::byte* const own_b = all_a + a_bytes;
  // A step of the depth and a column of tiles have a place among those kept.
  const auto a = [&](int64_t place, int64_t i) { return all_a + (place * task.row_tiles + i) * tile.a_bytes(); };
  const auto sums = [&](int64_t place, int64_t i) { return all_sums + (place * task.row_tiles + i) * tile.sums(); };
  const auto pack_a = [&](int64_t k, int64_t place) {
    const PackedGemm& packed = tiles.for_depth(left(block, shape, k));
    for (int64_t i = 0; i < task.row_tiles; ++i) {
      packed.pack_a(block.gemm->a.part((task.row + i) * shape.rows, k * shape.depth, shape.rows, shape.depth), a(place, i));
    }
  };
  const auto add = [&](int64_t k, int64_t k_place, int64_t j, int64_t j_place) {
    const std::byte* b = own_b;
    if (block.cut.shared) {
      b = block.packed_b + ((task.col + j) * depth + k) * tile.b_bytes();
    } else {
      pack_b(block, tiles, k, task.col + j, own_b);
    }
    TileWorker& worker = workers.for_depth(left(block, shape, k));
    for (int64_t i = 0; i < task.row_tiles; ++i) worker.run(a(k_place, i), b, k > 0, sums(j_place, i));
  };
  const auto finish_column = [&](int64_t j, int64_t place) {
    for (int64_t i = 0; i < task.row_tiles; ++i) {
      finish(*block.gemm, shape, (task.row + i) * shape.rows, (block.col + task.col + j) * shape.cols, sums(place, i));
    }
  };
  if (whole) {
    if (depth == 0) std::fill_n(all_sums, elements, 0.0F);
    for (int64_t k = 0; k < depth; ++k) pack_a(k, k);
    for (int64_t j = 0; j < task.col_tiles; ++j) {
      for (int64_t k = 0; k < depth; ++k) add(k, k, j, 0);
      finish_column(j, 0);
    }
  } else {
    for (int64_t k = 0; k < depth; ++k) {
      pack_a(k, 0);
      for (int64_t j = 0; j < task.col_tiles; ++j) add(k, 0, j, j);
    }
    for (int64_t j = 0; j < task.col_tiles; ++j) finish_column(j, j);
  }
}

// Runs the column blocks that share memory for packed tiles of b.
class Batch {
 public:
  Batch(const PackedGemms& tiles, Subnormals subnormals) : tiles_(tiles), tile_(tiles.whole), subnormals_(subnormals) {}

  void add(const TiledGemm& gemm) {
    const Tiles tiles = tiles_of(gemm, tile_.shape());
    if (tiles.rows == 0 || tiles.cols == 0) return;
    const Cut cut = cut_of(tiles, tile_);
    const int64_t column = cut.shared ? tiles.depth * tile_.b_bytes() : 0, most = cut.shared ? kSharedBytes / column : tiles.cols;
    const int64_t blocks = ceil_div(tiles.cols, most);
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t col = i * tiles.cols / blocks, width = (i + 1) * tiles.cols / blocks - col;
      if (shared_ + width * column > kSharedBytes) run();
      blocks_.push_back({.gemm = &gemm, .cut = cut, .col = col, .col_tiles = width});
      shared_ += width * column;
    }
  }

  void run() {
    if (blocks_.empty()) return;
    if (shared_ > 0) pack();
    std::vector<Task> tasks;
    int64_t all = 0;
    const auto size = [](const ColumnBlock& block, const Tiles& tiles) { return tiles.rows * block.col_tiles; };
    for (const ColumnBlock& block : blocks_) all += size(block, tiles_of(*block.gemm, tile_.shape()));
    for (const ColumnBlock& block : blocks_) {
      const Tiles tiles = tiles_of(*block.gemm, tile_.shape());
      add_tasks(block, tiles, ceil_div(num_threads() * size(block, tiles), std::max<int64_t>(1, all)), tasks);
    }
    parallel_for(std::ssize(tasks), 1, subnormals_, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) run_task(tasks[static_cast<size_t>(t)], tiles_);
    });
    blocks_.clear();
    shared_ = 0;
  }

 private:
  // Packs b of the column blocks that share it.
  void pack() {
    thread_local AlignedBytes memory;
    std::byte* to = memory.at_least(shared_);
    for (ColumnBlock& block : blocks_) {
      if (!block.cut.shared) continue;
      block.packed_b = to;
      const int64_t depth = tiles_of(*block.gemm, tile_.shape()).depth;
      parallel_for(depth * block.col_tiles, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          // Packs in the order of memory.
          const bool by_column = block.gemm->b.transposed;
          const int64_t k = by_column ? t % depth : t / block.col_tiles, j = by_column ? t / depth : t % block.col_tiles;
          pack_b(block, tiles_, k, j, block.packed_b + (j * depth + k) * tile_.b_bytes());
        }
      });
      to += depth * block.col_tiles * tile_.b_bytes();
    }
  }

  const PackedGemms& tiles_;
  const PackedGemm& tile_;
  Subnormals subnormals_;
  std::vector<ColumnBlock> blocks_;
  int64_t shared_ = 0;  // bytes
};

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

void load_bias(const Tensor* bias, int64_t first, int64_t cols, float* to) {
  if (!bias) return std::fill_n(to, cols, 0.0F), void();
  with_narrow_values(bias->dtype(), [&]<class T>() {
    const T* from = bias->device_data<T>() + first;
    for (int64_t i = 0; i < cols; ++i) to[i] = load(from[i]);
  });
}

void multiply(Dtype dtype, Subnormals subnormals, std::span<const TiledGemm> gemms) {
  Batch batch(packed_gemms(dtype), subnormals);
  for (const TiledGemm& gemm : gemms) batch.add(gemm);
  batch.run();
}

}  // namespace mantissa
