#include "backend/cpu/fast/gemm/packed_gemm.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <unordered_map>

#include "backend/cpu/fast/gemm/onednn_matmul.h"
#include "backend/cpu/fast/simd.h"
#include "base/generated_call.h"
#include "base/parallel.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

// Each instruction set has the bits of those that it includes; their order says nothing (AVX2 with VNNI is the largest of oneDNN 2.6).
bool includes(dnnl::cpu_isa isa, dnnl::cpu_isa part) {
  const auto bits = [](dnnl::cpu_isa set) { return static_cast<unsigned>(set); };
  return (bits(isa) & bits(part)) == bits(part);
}

}  // namespace

const char* isa_name(dnnl::cpu_isa isa) {
  using dnnl::cpu_isa;
  if (includes(isa, cpu_isa::avx512_core_amx)) return "AMX bf16";
  if (includes(isa, cpu_isa::avx512_core_bf16)) return "AVX-512 bf16";
  if (includes(isa, cpu_isa::avx512_core)) return "AVX-512";
  if (includes(isa, cpu_isa::avx2)) return "AVX2";
  if (includes(isa, cpu_isa::avx)) return "AVX";
  return "SSE4.1";
}

const char* onednn_isa_name() { return isa_name(dnnl::get_effective_cpu_isa()); }

bool onednn_has_bf16() { return includes(dnnl::get_effective_cpu_isa(), dnnl::cpu_isa::avx512_core_bf16); }

bool onednn_has_amx() { return includes(dnnl::get_effective_cpu_isa(), dnnl::cpu_isa::avx512_core_amx); }

namespace {

using simd::Floats;
using Halves = uint16_t __attribute__((vector_size(32)));

constexpr int64_t kCacheLineBytes = 64;

// The unit of transposition: `kRows` rows of eight elements become eight vectors of `kRows` lanes. Memory of any alignment.
template <class T>
struct Lanes {};
template <>
struct Lanes<float> {
  using Vector = Floats;
  using Stored = float __attribute__((vector_size(32), aligned(2), may_alias));
  static constexpr int kRows = 8;
  [[gnu::always_inline]] static Vector load(const std::byte* from, int64_t stride, int row) {
    return *reinterpret_cast<const Stored*>(from + row * stride);
  }
};
template <>
struct Lanes<bf16> {
  using Vector = Halves;
  using Stored = uint16_t __attribute__((vector_size(32), aligned(2), may_alias));
  static constexpr int kRows = 16;
  // Loads row r beside row r + 8.
  [[gnu::always_inline]] static Vector load(const std::byte* from, int64_t stride, int row) {
    using simd::detail::AnyHalfWords;
    const auto low = *reinterpret_cast<const AnyHalfWords*>(from + row * stride);
    const auto high = *reinterpret_cast<const AnyHalfWords*>(from + (row + 8) * stride);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
};

// Transposes eight vectors of eight lanes: pairs, then pairs of pairs, then halves.
[[gnu::always_inline]] inline void transpose8(Floats (&r)[8]) {
  Floats t[8];
  for (int64_t i = 0; i < 4; ++i) {
    t[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  Floats u[8];
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      u[4 * i + 2 * j] = __builtin_shufflevector(t[4 * i + j], t[4 * i + 2 + j], 0, 1, 8, 9, 4, 5, 12, 13);
      u[4 * i + 2 * j + 1] = __builtin_shufflevector(t[4 * i + j], t[4 * i + 2 + j], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int64_t i = 0; i < 4; ++i) {
    r[i] = __builtin_shufflevector(u[i], u[4 + i], 0, 1, 2, 3, 8, 9, 10, 11);
    r[4 + i] = __builtin_shufflevector(u[i], u[4 + i], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Like transpose8() above, but for each half of eight vectors, by three perfect shuffles.
[[gnu::always_inline]] inline void transpose8(Halves (&r)[8]) {
  for (int stage = 0; stage < 3; ++stage) {
    Halves t[8];
    for (int64_t i = 0; i < 4; ++i) {
      t[2 * i] = __builtin_shufflevector(r[i], r[i + 4], 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
      t[2 * i + 1] = __builtin_shufflevector(r[i], r[i + 4], 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int64_t i = 0; i < 8; ++i) r[i] = t[i];
  }
}

struct Matrix {
  const std::byte* data;
  int64_t stride;  // bytes from one row to the next
  int64_t rows, cols;
};

// to[j * to_ld + i] = element (i, j) of `from`. It takes a few rows at a time, so that rows at a distance of a power of two do not drive
// each other out of the cache.
template <class T>
[[gnu::always_inline]] inline void transpose(const Matrix& from, T* to, int64_t to_ld) {
  constexpr int64_t kSize = sizeof(T);
  constexpr int kRows = Lanes<T>::kRows;
  const int64_t whole_rows = from.rows / kRows * kRows, whole_cols = from.cols / 8 * 8;
  const auto copy = [&](int64_t i, int64_t j) __attribute__((always_inline)) {
    std::memcpy(to + j * to_ld + i, from.data + i * from.stride + j * kSize, kSize);
  };
  for (int64_t i = 0; i < whole_rows; i += kRows) {
    for (int64_t j = 0; j < whole_cols; j += 8) {
      if (j * kSize % kCacheLineBytes == 0) {  // rows are too short for the hardware to see the next ones coming
        for (int64_t r = i + kRows; r < std::min(i + 2 * kRows, from.rows); ++r)
          __builtin_prefetch(from.data + r * from.stride + j * kSize);
      }
      typename Lanes<T>::Vector block[8];
      for (int r = 0; r < 8; ++r) block[r] = Lanes<T>::load(from.data + i * from.stride + j * kSize, from.stride, r);
      transpose8(block);
      for (int r = 0; r < 8; ++r) *reinterpret_cast<typename Lanes<T>::Stored*>(to + (j + r) * to_ld + i) = block[r];
    }
    for (int64_t j = whole_cols; j < from.cols; ++j) {
      for (int r = 0; r < kRows; ++r) copy(i + r, j);
    }
  }
  for (int64_t i = whole_rows; i < from.rows; ++i) {
    for (int64_t j = 0; j < from.cols; ++j) copy(i, j);
  }
}

// to[2 * j] = low[j], to[2 * j + 1] = high[j].
[[gnu::always_inline]] inline void interleave(const bf16* low, const bf16* high, bf16* to, int64_t n) {
  using Stored = Lanes<bf16>::Stored;
  constexpr int64_t kWidth = 16;
  const int64_t whole = n / kWidth * kWidth;
  for (int64_t j = 0; j < whole; j += kWidth) {
    const Halves a = *reinterpret_cast<const Stored*>(low + j), b = *reinterpret_cast<const Stored*>(high + j);
    auto* const out = reinterpret_cast<Stored*>(to + 2 * j);
    out[0] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    out[1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
  for (int64_t j = whole; j < n; ++j) to[2 * j] = low[j], to[2 * j + 1] = high[j];
}

// Copies the rows of the block as they are stored.
void copy_rows(const Block& from, const TileLayout& tile, std::byte* to) {
  const int64_t from_row = from.ld * dtype_bytes(from.dtype), to_row = tile.ld * dtype_bytes(tile.dtype);
  const auto row_bytes = static_cast<size_t>(from.cols * dtype_bytes(tile.dtype));
  for (int64_t i = 0; i < from.rows; ++i) {
    const std::byte* row = from.data + i * from_row;
    std::byte* out = to + i * to_row;
    if (from.dtype == tile.dtype) {
      std::memcpy(out, row, row_bytes);
    } else {
      cloned<simd::convert<bf16, float>>(reinterpret_cast<const bf16*>(row), reinterpret_cast<float*>(out), from.cols);
    }
  }
}

// The memory of a transposed block.
Matrix stored(const Block& from) {
  return {.data = from.data, .stride = from.ld * dtype_bytes(from.dtype), .rows = from.cols, .cols = from.rows};
}

void transpose_block(const Block& from, const TileLayout& tile, std::byte* to) {
  if (from.dtype == Dtype::bf16) {
    cloned<transpose<bf16>>(stored(from), reinterpret_cast<bf16*>(to), tile.ld);
  } else {
    cloned<transpose<float>>(stored(from), reinterpret_cast<float*>(to), tile.ld);
  }
}

// Transposes as bf16, then widens.
void widen_transposed(const Block& from, const TileLayout& tile, std::byte* to) {
  alignas(64) thread_local bf16 narrow[size_t{128} * 128];
  constexpr int64_t kStep = 128;
  for (int64_t i = 0; i < from.rows; i += kStep) {
    for (int64_t j = 0; j < from.cols; j += kStep) {
      const Block part = from.part(i, j, kStep, kStep);
      auto* const bytes = reinterpret_cast<std::byte*>(narrow);
      transpose_block(part, {.dtype = Dtype::bf16, .rows = kStep, .cols = kStep, .ld = kStep}, bytes);
      copy_rows({.data = bytes, .dtype = Dtype::bf16, .ld = kStep, .rows = part.rows, .cols = part.cols, .transposed = false}, tile,
                to + (i * tile.ld + j) * dtype_bytes(tile.dtype));
    }
  }
}

// Writes rows 2i and 2i + 1 of a bf16 block, element by element, at to + 2 * i * ld. A row of zeros follows the last one of an odd number.
void pack_pairs(const Block& from, int64_t ld, bf16* to) {
  const int64_t pairs = from.rows / 2;
  const auto* data = reinterpret_cast<const bf16*>(from.data);
  if (from.transposed) {  // a pair is one element of four bytes
    Matrix elements = stored(from);
    elements.cols = pairs;
    cloned<transpose<float>>(elements, reinterpret_cast<float*>(to), ld);
  } else {
    for (int64_t i = 0; i < pairs; ++i) {
      cloned<interleave>(data + 2 * i * from.ld, data + (2 * i + 1) * from.ld, to + 2 * i * ld, from.cols);
    }
  }
  if (from.rows % 2 == 0) return;
  const int64_t last = from.rows - 1;
  for (int64_t j = 0; j < from.cols; ++j) {
    to[last * ld + 2 * j] = data[from.transposed ? j * from.ld + last : last * from.ld + j];
    to[last * ld + 2 * j + 1] = {};
  }
}

// Writes zeros behind the first elements, `filled_rows` x `filled_cols`, of a tile that is stored row by row.
void clear(const TileLayout& tile, int64_t filled_rows, int64_t filled_cols, std::byte* to) {
  const int64_t element = dtype_bytes(tile.dtype);
  const auto clear_row = [&](int64_t row, int64_t col) {
    std::memset(to + (row * tile.ld + col) * element, 0, static_cast<size_t>((tile.cols - col) * element));
  };
  for (int64_t i = 0; i < filled_rows && filled_cols < tile.cols; ++i) clear_row(i, filled_cols);
  for (int64_t i = filled_rows; i < tile.rows; ++i) clear_row(i, 0);
}

}  // namespace

Block Block::part(int64_t row, int64_t col, int64_t most_rows, int64_t most_cols) const {
  const int64_t element = transposed ? col * ld + row : row * ld + col;
  return {.data = data + element * dtype_bytes(dtype),
          .dtype = dtype,
          .ld = ld,
          .rows = std::min(most_rows, rows - row),
          .cols = std::min(most_cols, cols - col),
          .transposed = transposed};
}

void pack_block(const Block& from, const TileLayout& tile, std::byte* to) {
  if (!from.transposed) {
    copy_rows(from, tile, to);
  } else if (from.dtype == tile.dtype) {
    transpose_block(from, tile, to);
  } else {
    widen_transposed(from, tile, to);
  }
  clear(tile, from.rows, from.cols, to);
}

void pack_panels(const Block& from, const PanelLayout& tile, std::byte* to) {
  const int64_t panel_bytes = tile.rows * tile.ld * dtype_bytes(tile.dtype);
  for (int64_t first = 0; first < tile.cols; first += tile.panel, to += panel_bytes) {
    const Block part = from.part(0, std::min(first, from.cols), from.rows, tile.panel);
    if (tile.pairs) {
      pack_pairs(part, tile.ld, reinterpret_cast<bf16*>(to));
      // Two rows of the tile are one of twice the length.
      clear({.dtype = tile.dtype, .rows = tile.rows / 2, .cols = 2 * tile.panel, .ld = 2 * tile.ld}, (part.rows + 1) / 2, 2 * part.cols,
            to);
    } else {
      pack_block(part, {.dtype = tile.dtype, .rows = tile.rows, .cols = tile.panel, .ld = tile.ld}, to);
    }
  }
}

namespace {

using dnnl::memory;

constexpr std::align_val_t kCacheLine{64};

// Kernels of oneDNN prefetch behind the operand that they multiply by: jit_avx_gemm_f32 of 2.6 up to 55 KB, brgemm a step of the depth. A
// prefetch from a page that was never written finds no translation, looks for it again each time, and costs a hundred times as much.
constexpr int64_t kReadAhead = int64_t{64} << 10, kPage = 4096;

// Columns behind those of a tile of b that is stored row by row: rows at a distance of a power of two would share few sets of the cache.
constexpr int64_t kColumnPadding = 16;

// The layouts that the library reads without a copy of its own, for a tile whose columns are a multiple of the panel.
struct KnownLayout {
  int64_t panel;
  memory::format_tag tag;
  bool pairs;
};
using Tag = memory::format_tag;
constexpr KnownLayout kKnownLayouts[] = {{64, Tag::BA16a64b, false},  {64, Tag::BA16a64b2a, true}, {48, Tag::BA16a48b, false},
                                         {48, Tag::BA16a48b2a, true}, {32, Tag::BA16a32b, false},  {32, Tag::BA16a32b2a, true},
                                         {16, Tag::BA16a16b, false},  {16, Tag::BA16a16b2a, true}};

// Returns the layout that the library prefers for this GEMM, or else rows.
PanelLayout layout_of_b(const MatmulOperands& operands, Dtype dtype, const TileShape& shape, const std::string& which) {
  MatmulOperands any = operands;
  any.b = memory::desc({shape.depth, shape.cols}, data_type_of(dtype), memory::format_tag::any);
  const memory::desc liked = describe_gemm(any, true, which).weights_desc();
  for (const auto& [panel, tag, pairs] : kKnownLayouts) {
    if (shape.cols % panel != 0 || pairs != (dtype == Dtype::bf16)) continue;
    if (liked != memory::desc({shape.depth, shape.cols}, data_type_of(dtype), tag)) continue;
    return {.dtype = dtype, .rows = shape.depth, .cols = shape.cols, .panel = panel, .ld = panel, .pairs = pairs};
  }
  return {.dtype = dtype, .rows = shape.depth, .cols = shape.cols, .panel = shape.cols, .ld = shape.cols + kColumnPadding, .pairs = false};
}

memory::desc description_of_b(const PanelLayout& layout) {
  for (const auto& [panel, tag, pairs] : kKnownLayouts) {
    if (panel == layout.panel && pairs == layout.pairs && layout.ld == panel) {
      return {{layout.rows, layout.cols}, data_type_of(layout.dtype), tag};
    }
  }
  return matrix_description(layout.rows, layout.cols, layout.dtype, layout.ld, 1);
}

}  // namespace

TileShape tile_shape(Dtype dtype) {
  if (dtype == Dtype::bf16 && onednn_has_amx()) return {.rows = 64, .cols = 256, .depth = 256};
  return {.rows = 64, .cols = 128, .depth = 256};
}

std::byte* AlignedBytes::at_least(int64_t bytes) {
  if (size_ < bytes) {
    bytes_.reset();
    size_ = 0;
    bytes_.reset(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes + kReadAhead), kCacheLine)));
    for (int64_t at = 0; at < bytes + kReadAhead; at += kPage) bytes_.get()[at] = {};
    size_ = bytes;
  }
  return bytes_.get();
}

void AlignedBytes::Free::operator()(std::byte* bytes) const { ::operator delete(bytes, kCacheLine); }

struct PackedGemm::Library {
  memory::desc a, b, sums, scratchpad;  // scratchpad is the larger one
  dnnl::matmul set, add;
};

PackedGemm::PackedGemm(Dtype dtype, const TileShape& shape) : dtype_(dtype), shape_(shape) {
  const auto [rows, cols, depth] = shape;
  const std::string which = text(rows, " x ", cols, " x ", depth, " for ", dtype);
  MatmulOperands operands{
      .a = matrix_description(rows, depth, dtype, depth, 1), .b = {}, .c = matrix_description(rows, cols, Dtype::f32, cols, 1)};
  layout_of_b_ = layout_of_b(operands, dtype, shape, which);
  operands.b = description_of_b(layout_of_b_);
  const auto set = describe_gemm(operands, false, which), add = describe_gemm(operands, true, which);
  const memory::desc scratchpad[] = {set.scratchpad_desc(), add.scratchpad_desc()};
  library_ = std::make_unique<Library>(Library{.a = operands.a,
                                               .b = operands.b,
                                               .sums = operands.c,
                                               .scratchpad = scratchpad[scratchpad[0].get_size() < scratchpad[1].get_size() ? 1 : 0],
                                               .set = dnnl::matmul(set),
                                               .add = dnnl::matmul(add)});
}

PackedGemm::~PackedGemm() = default;

void PackedGemm::pack_a(const Block& block, std::byte* to) const {
  pack_block(block, {.dtype = dtype_, .rows = shape_.rows, .cols = shape_.depth, .ld = shape_.depth}, to);
}

void PackedGemm::pack_b(const Block& block, std::byte* to) const { pack_panels(block, layout_of_b_, to); }

const PackedGemms& packed_gemms(Dtype dtype) {
  const auto make = [](Dtype packed) {
    const PackedGemms* gemms = nullptr;  // never destroyed: threads keep workers of them
    const TileShape whole = tile_shape(packed), half{.rows = whole.rows, .cols = whole.cols, .depth = whole.depth / 2};
    parallel_for(1, 1,
                 [&](int64_t, int64_t) { gemms = new PackedGemms{.whole = PackedGemm(packed, whole), .half = PackedGemm(packed, half)}; });
    return gemms;
  };
  if (dtype == Dtype::bf16) {
    static const PackedGemms& bf16_gemms = *make(Dtype::bf16);
    return bf16_gemms;
  }
  static const PackedGemms& fp32_gemms = *make(Dtype::f32);
  return fp32_gemms;
}

struct TileWorker::Calls {
  dnnl::stream stream;
  memory a, b, sums, scratchpad;
  std::unordered_map<int, memory> arguments;
};

TileWorker::TileWorker(const PackedGemm& gemm) : gemm_(gemm), calls_(std::make_unique<Calls>()) {
  const PackedGemm::Library& library = *gemm.library_;
  const auto bound = [](const memory::desc& description) { return memory(description, cpu_engine(), nullptr); };
  Calls& calls = *calls_;
  calls.stream = dnnl::stream(cpu_engine());
  calls.a = bound(library.a), calls.b = bound(library.b), calls.sums = bound(library.sums);
  calls.scratchpad = bound(library.scratchpad);
  calls.scratchpad.set_data_handle(scratchpad_.at_least(std::max<int64_t>(1, static_cast<int64_t>(library.scratchpad.get_size()))));
  calls.arguments = {
      {DNNL_ARG_SRC, calls.a}, {DNNL_ARG_WEIGHTS, calls.b}, {DNNL_ARG_DST, calls.sums}, {DNNL_ARG_SCRATCHPAD, calls.scratchpad}};
}

TileWorker::~TileWorker() = default;

void TileWorker::run(const std::byte* a, const std::byte* b, bool accumulate, float* sums) {
  calls_->a.set_data_handle(const_cast<std::byte*>(a));
  calls_->b.set_data_handle(const_cast<std::byte*>(b));
  calls_->sums.set_data_handle(sums);
  const GeneratedCall here;
  (accumulate ? gemm_.library_->add : gemm_.library_->set).execute(calls_->stream, calls_->arguments);
}

TileWorkers& tile_workers(Dtype dtype) {
  const auto make = [](Dtype packed) {
    const auto& [whole, half] = packed_gemms(packed);
    return TileWorkers{.whole = TileWorker(whole), .half = TileWorker(half)};
  };
  if (dtype == Dtype::bf16) {
    thread_local TileWorkers bf16_workers = make(Dtype::bf16);
    return bf16_workers;
  }
  thread_local TileWorkers fp32_workers = make(Dtype::f32);
  return fp32_workers;
}

}  // namespace mantissa
