#include <bit>

#include "backend/cuda/codes/codes.h"
#include "backend/cuda/cuda_backend.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// The place for the codes of a matrix, and its blocks.
struct Codes {
  uint8_t *codes, *scales;
  int64_t rows, cols;
  int64_t block_rows, block_cols, blocks_across;
  ScaleRule rule;
  ScaleRange range;

  explicit Codes(const QuantizedTensor& tensor)
      : codes(tensor.codes.device_data<uint8_t>()),
        scales(tensor.scales.device_data<uint8_t>()),
        rows(tensor.shape[0]),
        cols(tensor.shape[1]),
        block_rows(tensor.how.block_rows),
        block_cols(tensor.how.block_cols),
        blocks_across(tensor.scales.dim(1)),
        rule(tensor.how.rule),
        range(tensor.how.range) {}
  MANTISSA_HOST_DEVICE int64_t row_blocks() const { return ceil_div(rows, block_rows); }
  MANTISSA_HOST_DEVICE int64_t blocks() const { return row_blocks() * blocks_across; }
  // The end of the rows, and of the columns, of a block that begins here; the last block may be smaller.
  MANTISSA_HOST_DEVICE int64_t end_row(int64_t first) const { return first + block_rows < rows ? first + block_rows : rows; }
  MANTISSA_HOST_DEVICE int64_t end_col(int64_t first) const { return first + block_cols < cols ? first + block_cols : cols; }
};

// x [rows, cols], and zeros below.
template <class T>
struct Source {
  Packs<const T> first_row;
  int64_t rows;

  __device__ Pack read(int64_t row, int64_t col) const { return row < rows ? first_row.row(row).read(col) : Pack{}; }
  __device__ uint32_t bits(int64_t row, int64_t col) const {
    return row < rows ? __builtin_bit_cast(uint32_t, value_of(first_row.values[row * first_row.count + col])) : 0U;
  }
};

// Codes that are requantized, as a source of values.
template <class E>
struct SourceOfCodes {
  CodePacks<E> codes;

  __device__ Pack read(int64_t row, int64_t col) const {
    bool extreme = false;
    return codes.read(row, col, codes.cols, extreme);
  }
  __device__ uint32_t bits(int64_t row, int64_t col) const { return codes.bits(row, col); }
};

template <class E>
__device__ void write_codes(const Codes& to, int64_t row, int64_t col, const PackOfCodes<E>& codes) {
  store(to.codes + (row * to.cols + col) / E::codes_per_byte, codes.bytes);
}

__device__ inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }

// The scale of a block with this key. If all its elements decide, each(add) calls add(bits) for those of this thread, and joined(sum) adds
// the sums of the threads that share the block.
template <class E, class Each, class Joined>
__device__ uint8_t scale_of(const Codes& to, uint32_t key, const Each& each, const Joined& joined) {
  const uint32_t amax = amax_of_key(key);
  if (!searches_scale<E>(to.rule)) return block_scale<E>(amax, to.rule, to.range);
  ScaleErrors errors;
  each([&](uint32_t bits) { errors.add(bits, amax); });
  return searched_scale<E>(amax, {joined(errors.below), joined(errors.above)}, to.range);
}

struct Alone {
  __device__ int64_t operator()(int64_t sum) const { return sum; }
};
struct JoinWarp {
  __device__ int64_t operator()(int64_t sum) const { return join_warp(sum, Plus<int64_t>()); }
};

// Quantizes blocks of a row. A warp has a row, and the lanes beside each other that have a block find its largest element together.
template <class E, class From>
__global__ void __launch_bounds__(kThreads) quantize_rows(From from, Codes to) {
  const int64_t row = OfWarp::row();
  if (row >= to.rows) return;
  const auto lanes = static_cast<unsigned>(to.block_cols) / kPack;
  for (int64_t start = 0; start < to.cols; start += kWarp * kPack) {
    const int64_t col = start + lane() * kPack;
    const bool inside = col < to.cols;
    const Pack pack = inside ? from.read(row, col) : Pack{};
    const auto join = [lanes](auto value, auto join_two) {
      for (unsigned distance = 1; distance < lanes; distance *= 2) value = join_two(value, shuffle_xor(value, distance));
      return value;
    };
    uint32_t key = 0;
    if (inside) {
      for (const float value : pack.at) key = Largest<uint32_t>()(key, amax_key(bits_of(value), to.rule));
    }
    const uint8_t scale = scale_of<E>(
        to, join(key, Largest<uint32_t>()),
        [&](const auto& add) {
          for (const float value : pack.at) add(bits_of(value));
        },
        [&](int64_t sum) { return join(sum, Plus<int64_t>()); });
    if (!inside) continue;
    write_codes<E>(to, row, col, encoded<E>(pack, PackOfScales::all(scale), to.rule));
    if (lane() % lanes == 0) to.scales[row * to.blocks_across + col / to.block_cols] = scale;
  }
}

// Quantizes tiles. A warp has one, and goes over its packs twice.
template <class E, class From>
__global__ void __launch_bounds__(kThreads) quantize_tiles(From from, Codes to) {
  const int64_t index = OfWarp::row();
  if (index >= to.blocks()) return;
  const auto across = static_cast<uint32_t>(to.blocks_across);
  const int64_t first_row = static_cast<uint32_t>(index) / across * to.block_rows,
                first_col = static_cast<uint32_t>(index) % across * to.block_cols;
  const auto packs_of_row = static_cast<uint32_t>(to.end_col(first_col) - first_col) / kPack,
             packs = static_cast<uint32_t>(to.end_row(first_row) - first_row) * packs_of_row;
  const auto each_pack = [&](const auto& visit) {
    MANTISSA_UNROLL_BY(4)
    for (uint32_t pack = lane(); pack < packs; pack += kWarp)
      visit(first_row + pack / packs_of_row, first_col + pack % packs_of_row * kPack);
  };
  uint32_t key = 0;
  each_pack([&](int64_t row, int64_t col) {
    for (const float value : from.read(row, col).at) key = Largest<uint32_t>()(key, amax_key(bits_of(value), to.rule));
  });
  const uint8_t scale = scale_of<E>(
      to, join_warp(key, Largest<uint32_t>()),
      [&](const auto& add) {
        each_pack([&](int64_t row, int64_t col) {
          for (const float value : from.read(row, col).at) add(bits_of(value));
        });
      },
      JoinWarp());
  each_pack(
      [&](int64_t row, int64_t col) { write_codes<E>(to, row, col, encoded<E>(from.read(row, col), PackOfScales::all(scale), to.rule)); });
  if (lane() == 0) to.scales[index] = scale;
}

// Quantizes blocks of a column. A thread has eight of them, side by side.
template <class E, class From>
__global__ void __launch_bounds__(kThreads, 2) quantize_columns(From from, Codes to) {
  const auto across = static_cast<uint32_t>(to.cols / kPack);
  for_each_element(to.row_blocks() * across, [=](int64_t index) {
    const int64_t block_row = static_cast<uint32_t>(index) / across, col = static_cast<uint32_t>(index) % across * kPack,
                  first = block_row * to.block_rows, end = to.end_row(first);
    uint32_t keys[kPack] = {};
    MANTISSA_UNROLL_BY(4)
    for (int64_t row = first; row < end; ++row) {
      const Pack pack = from.read(row, col);
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) keys[i] = Largest<uint32_t>()(keys[i], amax_key(bits_of(pack.at[i]), to.rule));
    }
    PackOfScales scales{0};
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const auto column = [&](const auto& add) {
        for (int64_t row = first; row < end; ++row) add(from.bits(row, col + i));
      };
      scales.bytes |= uint64_t{scale_of<E>(to, keys[i], column, Alone())} << (8 * i);
    }
    store(to.scales + block_row * to.cols + col, scales.bytes);
    MANTISSA_UNROLL_BY(2)
    for (int64_t row = first; row < end; ++row) write_codes<E>(to, row, col, encoded<E>(from.read(row, col), scales, to.rule));
  });
}

// A warp has a block of the format, whose rows fill whole bytes. A lane has every 32nd byte.
template <class E, class From>
__global__ void __launch_bounds__(kThreads) quantize(From from, Codes to) {
  constexpr int64_t kEach = E::codes_per_byte;
  const int64_t index = block() * kWarpsOfBlock + warp();
  if (index >= to.blocks()) return;
  const int64_t first_row = index / to.blocks_across * to.block_rows, first_col = index % to.blocks_across * to.block_cols;
  const auto bytes_of_row = static_cast<uint32_t>((to.end_col(first_col) - first_col) / kEach),
             bytes = static_cast<uint32_t>(to.end_row(first_row) - first_row) * bytes_of_row;
  const auto element = [&](uint32_t byte, int64_t i) {
    return from.bits(first_row + byte / bytes_of_row, first_col + byte % bytes_of_row * kEach + i);
  };
  uint32_t key = 0;
  for (uint32_t byte = lane(); byte < bytes; byte += kWarp)
    for (int64_t i = 0; i < kEach; ++i) key = Largest<uint32_t>()(key, amax_key(element(byte, i), to.rule));
  const auto each = [&](const auto& add) {
    for (uint32_t byte = lane(); byte < bytes; byte += kWarp)
      for (int64_t i = 0; i < kEach; ++i) add(element(byte, i));
  };
  const uint8_t scale = scale_of<E>(to, join_warp(key, Largest<uint32_t>()), each, JoinWarp());
  for (uint32_t byte = lane(); byte < bytes; byte += kWarp) {
    uint32_t codes = 0;
    for (int64_t i = 0; i < kEach; ++i) codes |= uint32_t{encode_in_block<E>(element(byte, i), scale, to.rule)} << (4 * i);
    to.codes[((first_row + byte / bytes_of_row) * to.cols + first_col) / kEach + byte % bytes_of_row] = static_cast<uint8_t>(codes);
  }
  if (lane() == 0) to.scales[index] = scale;
}

// So many groups of blocks side by side that share their bytes.
template <class E>
MANTISSA_HOST_DEVICE int64_t groups_of_blocks(const Codes& to) {
  return to.row_blocks() * ceil_div(to.blocks_across, int64_t{E::codes_per_byte});
}

// Quantizes blocks that are columns, so that threads beside each other read neighbors, and blocks whose rows end within a byte: a thread
// has a block, or those that share their bytes. With room for more than four blocks of a multiprocessor the compiler would keep some of a
// thread's values in memory.
template <class E, class From>
__global__ void __launch_bounds__(kThreads, 4) quantize_alone(From from, Codes to) {
  for_each_element(groups_of_blocks<E>(to), [=](int64_t index) {
    constexpr int64_t kEach = E::codes_per_byte;
    const int64_t across = ceil_div(to.blocks_across, kEach), block_row = index / across, block_col = index % across * kEach;
    const int64_t first_row = block_row * to.block_rows, first_col = block_col * to.block_cols, end_row = to.end_row(first_row);
    uint8_t scales[size_t{kEach}] = {};
    int64_t bytes = 0;
    MANTISSA_UNROLL
    for (int64_t i = 0; i < kEach; ++i) {
      const int64_t col = first_col + i * to.block_cols;
      if (col >= to.cols) continue;
      const int64_t end_col = to.end_col(col);
      bytes = (end_col - first_col) / kEach;
      const auto each = [&](const auto& visit) {
        for (int64_t row = first_row; row < end_row; ++row)
          for (int64_t c = col; c < end_col; ++c) visit(from.bits(row, c));
      };
      uint32_t key = 0;
      each([&](uint32_t bits) { key = Largest<uint32_t>()(key, amax_key(bits, to.rule)); });
      to.scales[block_row * to.blocks_across + block_col + i] = scales[i] = scale_of<E>(to, key, each, Alone());
    }
    for (int64_t row = first_row; row < end_row; ++row) {
      for (int64_t byte = 0; byte < bytes; ++byte) {
        uint32_t codes = 0;
        for (int64_t i = 0; i < kEach; ++i) {
          const int64_t c = byte * kEach + i;
          const uint8_t scale = c < to.block_cols ? scales[0] : scales[kEach - 1];
          codes |= uint32_t{encode_in_block<E>(from.bits(row, first_col + c), scale, to.rule)} << (4 * i);
        }
        to.codes[(row * to.cols + first_col) / kEach + byte] = static_cast<uint8_t>(codes);
      }
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) find_nonfinite(Packs<const T> x, int32_t* found) {
  for_each_pack(x.count, [=](int64_t first) {
    bool any = false;
    for (const float value : x.read(first).at) any = any || (__builtin_bit_cast(uint32_t, value) & ~kFp32Sign) >= kFp32Inf;
    if (any) fetch_or(reinterpret_cast<uint32_t*>(found), 1U);
  });
}

// out [rows, out.count] is the columns of x from `first_col` on. extreme may be null.
template <class E, class Team, class T>
__global__ void __launch_bounds__(kThreads) dequantize(CodePacks<E> x, int64_t first_col, Packs<T> out, int64_t rows, int32_t* extreme) {
  const int64_t row = Team::row();
  if (row >= rows) return;
  const Packs<T> to = out.row(row);
  bool found = false;
  for_each_pack_of_row<Team>(out.count,
                             [&](int64_t first) { to.write(first, x.read(row, first_col + first, first_col + out.count, found)); });
  if (extreme != nullptr && found) fetch_or(reinterpret_cast<uint32_t*>(extreme), 1U);
}

// Inverts swizzled_offset().
__global__ void __launch_bounds__(kThreads)
    swizzle(const uint8_t* scales, int64_t outer_count, int64_t inner_count, int64_t outer_stride, int64_t inner_stride, uint8_t* out) {
  const int64_t tiles_across = ceil_div(inner_count, int64_t{4});
  for_each_element(swizzled_bytes(outer_count, inner_count), [=](int64_t i) {
    const int64_t tile = i / 512, place = i % 512;
    const int64_t outer = tile / tiles_across * 128 + place / 4 % 4 * 32 + place / 16, inner = tile % tiles_across * 4 + place % 4;
    out[i] = outer < outer_count && inner < inner_count ? scales[outer * outer_stride + inner * inner_stride] : uint8_t{0};
  });
}

bool in_packs(const Codes& to) {
  return to.cols % kPack == 0 && (reinterpret_cast<uintptr_t>(to.codes) | reinterpret_cast<uintptr_t>(to.scales)) % kPack == 0;
}
template <class E, class From>
KernelLaunch<From, Codes> columns_launch(const From&, const Codes& to) {
  if (in_packs(to)) return {quantize_columns<E, From>, {blocks_for(to.blocks() / kPack), kThreads}};
  return {quantize_alone<E, From>, {blocks_for(groups_of_blocks<E>(to)), kThreads}};
}
template <class E, class T>
KernelLaunch<Source<T>, Codes> quantize_launch(const Source<T>& from, const Codes& to) {
  using From = Source<T>;
  if (to.block_cols == 1) return columns_launch<E>(from, to);
  const int64_t lanes = to.block_cols / kPack;  // lanes of a row of a block
  if (in_packs(to) && to.block_cols % kPack == 0) {
    if (to.block_rows > 1) return {quantize_tiles<E, From>, {ceil_div(to.blocks(), int64_t{OfWarp::kRowsOfBlock}), kThreads}};
    if (lanes <= kWarp && std::has_single_bit(static_cast<uint64_t>(lanes)))
      return {quantize_rows<E, From>, {ceil_div(to.rows, int64_t{OfWarp::kRowsOfBlock}), kThreads}};
  }
  if (to.block_cols % E::codes_per_byte != 0) return {quantize_alone<E, From>, {blocks_for(groups_of_blocks<E>(to)), kThreads}};
  return {quantize<E, From>, {ceil_div(to.blocks(), int64_t{kWarpsOfBlock}), kThreads}};
}

}  // namespace

void CudaBackend::execute(const Quantize& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    const T* const x = k.x.device_data<T>();
    const Source<T> from{{x, k.x.dim(1), begin_at_packs(k.x.dim(1), x)}, k.x.dim(0)};
    for (const QuantizedTensor* out : {&k.out, &k.second}) {
      if (!out->defined()) continue;
      const Codes codes(*out);
      with_element(out->how.format, [&]<class E>() {
        const auto [kernel, grid] = quantize_launch<E>(from, codes);
        launch(kernel, grid, from, codes);
      });
    }
    if (!k.nonfinite.defined()) return;
    launch(find_nonfinite<T>, {blocks_for_packs(k.x.elements()), kThreads}, packs_of<const T>(k.x), k.nonfinite.device_data<int32_t>());
  });
}

void CudaBackend::execute(const Dequantize& k) {
  const int64_t rows = k.out.dim(0), columns = k.out.dim(1);
  with_element(k.x.how.format, [&]<class E>() {
    with_values(k.out.dtype(), [&]<class T>() {
      T* const out = k.out.device_data<T>();
      with_team(rows, columns, [&]<class Team>(Grid grid) {
        launch(dequantize<E, Team, T>, grid, CodePacks<E>(k.x), k.first_col, Packs<T>{out, columns, begin_at_packs(columns, out)}, rows,
               data_or_null<int32_t>(k.extreme));
      });
    });
  });
}

void CudaBackend::execute(const FakeQuantize& k) { execute(Dequantize{.x = quantized(k.x, k.how), .out = k.out}); }

void CudaBackend::execute(const RequantizeColumns& k) {
  const Codes to(k.out);
  with_element(k.x.how.format, [&]<class E>() {
    const SourceOfCodes<E> from{CodePacks<E>(k.x)};
    const auto [kernel, grid] = columns_launch<E>(from, to);
    launch(kernel, grid, from, to);
  });
}

void CudaBackend::execute(const SwizzleScales& k) {
  const bool rows = k.x.how.rowwise();
  const int64_t stride = k.x.scales.dim(1);
  launch(swizzle, {blocks_for(k.out.elements()), kThreads}, k.x.scales.device_data<uint8_t>(), k.x.shape[rows ? 0 : 1],
         k.x.scales.dim(rows ? 1 : 0), rows ? stride : 1, rows ? 1 : stride, k.out.device_data<uint8_t>());
}

}  // namespace mantissa
