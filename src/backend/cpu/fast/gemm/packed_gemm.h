// The GEMM of tiles from which all others on the CPU are built: sums [rows, cols] (+)= a [rows, depth] * b [depth, cols] by oneDNN, of one
// shape for the whole process, with operands packed into tiles without gaps and filled up with zeros. The bits of an element therefore
// depend only on its row of a, its column of b and its position in the tile: not on the number of rows, columns or threads, nor on strides,
// orientation, alignment or padding with zeros along the depth. Where at most half of a tile's depth is left, a tile of half the depth
// takes it. Whether the position in a tile matters, and which of the two depths multiplies, is up to the library: gemm_check.cpp tests it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

// Copies blocks of matrices into tiles: row by row or in panels, transposed, bf16 widened where the tile is fp32, zeros behind.

// A matrix of fp32 or bf16 in memory, or a part of one: element (i, j) lies at data[i * ld + j], if transposed at data[j * ld + i].
struct Block {
  const std::byte* data;
  Dtype dtype;
  int64_t ld;
  int64_t rows, cols;
  bool transposed;

  // Returns the part that begins at element (row, col), of at most so many rows and columns.
  Block part(int64_t row, int64_t col, int64_t most_rows, int64_t most_cols) const;
};

struct TileLayout {
  Dtype dtype;
  int64_t rows, cols, ld;
};

// to[i * ld + j] = element (i, j) of the block, which is at most as large as the tile; zero where the block has none. Elements behind
// `cols` in a row are left alone.
void pack_block(const Block& from, const TileLayout& tile, std::byte* to);

// A tile as panels of `panel` columns, which divide `cols`, one behind the other. In a panel a row follows `ld` elements behind the one
// before; with `pairs`, which need bf16 and an even number of rows, elements (2i, j) and (2i + 1, j) lie side by side, as instructions that
// sum two products take them:
//   to[(j / panel) * rows * ld + i * ld + j % panel], with pairs [(j / panel) * rows * ld + (i / 2) * 2 * ld + 2 * (j % panel) + i % 2]
struct PanelLayout {
  Dtype dtype;
  int64_t rows, cols, panel, ld;
  bool pairs;

  int64_t bytes() const { return cols / panel * rows * ld * dtype_bytes(dtype); }
};

// Like pack_block(), but into panels.
void pack_panels(const Block& from, const PanelLayout& tile, std::byte* to);

bool onednn_has_bf16();  // a bf16 dot product in hardware; without one, operands are widened to fp32, which is exact
bool onednn_has_amx();
// Names what oneDNN dispatches to: "AVX2", "AVX-512", "AVX-512 bf16", "AMX bf16" ... It ends with "bf16" if onednn_has_bf16().
const char* onednn_isa_name();

struct TileShape {
  int64_t rows, cols, depth;
};

// The shape that PackedGemms of this process have: large enough to reach the speed of large GEMMs, small enough that few rows of
// zeros are multiplied. AMX is so fast that the call of the library shows in smaller tiles.
TileShape tile_shape(Dtype dtype);

// Memory that starts at a cache line and keeps its size until more is asked for. All its pages, and those that kernels of the library
// prefetch behind it, were written once.
class AlignedBytes {
 public:
  std::byte* at_least(int64_t bytes);

 private:
  struct Free {
    void operator()(std::byte* bytes) const;
  };
  std::unique_ptr<std::byte, Free> bytes_;
  int64_t size_ = 0;
};

// Immutable, for any number of threads. dtype is that of packed operands: bf16 only where onednn_has_bf16().
class PackedGemm {
 public:
  // Throws Error(internal) if oneDNN has no implementation.
  PackedGemm(Dtype dtype, const TileShape& shape);
  ~PackedGemm();
  PackedGemm(const PackedGemm&) = delete;
  PackedGemm& operator=(const PackedGemm&) = delete;

  Dtype dtype() const { return dtype_; }
  const TileShape& shape() const { return shape_; }
  int64_t a_bytes() const { return shape_.rows * shape_.depth * dtype_bytes(dtype_); }
  int64_t b_bytes() const { return layout_of_b_.bytes(); }
  int64_t sums() const { return shape_.rows * shape_.cols; }  // elements

  // Packs a block of at most one tile; bf16 is widened where the tile is fp32, which is exact.
  void pack_a(const Block& block, std::byte* to) const;
  void pack_b(const Block& block, std::byte* to) const;

 private:
  friend class TileWorker;
  struct Library;

  Dtype dtype_;
  TileShape shape_;
  PanelLayout layout_of_b_;
  std::unique_ptr<Library> library_;
};

// The two GEMMs of a dtype; packed_gemms() returns those of this process.
struct PackedGemms {
  PackedGemm whole, half;  // with tile_shape(dtype), and with half its depth

  // Returns the GEMM for the next step of a sum, of which so much depth is left.
  const PackedGemm& for_depth(int64_t left) const { return left <= half.shape().depth ? half : whole; }
};
const PackedGemms& packed_gemms(Dtype dtype);

// Holds what one thread needs to use a PackedGemm, which must live longer. Call it inside parallel_for, where the library has one thread.
// Tiles and sums begin at cache lines.
class TileWorker {
 public:
  explicit TileWorker(const PackedGemm& gemm);
  ~TileWorker();
  TileWorker(const TileWorker&) = delete;
  TileWorker& operator=(const TileWorker&) = delete;

  const PackedGemm& gemm() const { return gemm_; }
  // sums [rows, cols], without gaps, = a * b, or += with `accumulate`.
  void run(const std::byte* a, const std::byte* b, bool accumulate, float* sums);

 private:
  struct Calls;
  const PackedGemm& gemm_;
  std::unique_ptr<Calls> calls_;
  AlignedBytes scratchpad_;
};

// The two workers of a dtype; tile_workers() returns those of the calling thread.
struct TileWorkers {
  TileWorker whole, half;  // for packed_gemms(dtype)

  TileWorker& for_depth(int64_t left) { return left <= half.gemm().shape().depth ? half : whole; }
};
TileWorkers& tile_workers(Dtype dtype);

// Checks what the promises of equal bits require of the library's GEMM on this CPU, and construction cannot ensure: that neither the
// position of a row or column in a tile matters nor which of the two depths multiplies. In gemm_check.cpp.

enum class Alike { rows, columns };

// Counts the rows, or columns, of a matrix of so many columns that have other bits than the first.
int64_t unequal_lines(std::span<const float> sums, int64_t cols, Alike alike);

// Multiplies tiles whose rows, and then those whose columns, are all alike, and compares the bits of the results; takes two to three
// milliseconds. Returns what differs; "" if nothing does.
std::string unequal_places(const PackedGemm& gemm);

// Multiplies the same operands with each, zeros behind them in the deeper one, and compares the bits. Returns "" if they are equal.
std::string unequal_depths(const PackedGemms& gemms);

}  // namespace mantissa
