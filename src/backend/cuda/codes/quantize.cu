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
  CodeRule rule;
  ScaleRange range;
  AmaxRule by_amax;  // not for NVFP4

  explicit Codes(const QuantizedTensor& tensor)
      : codes(tensor.codes.device_data<uint8_t>()),
        scales(tensor.scales.device_data<uint8_t>()),
        rows(tensor.shape[0]),
        cols(tensor.shape[1]),
        block_rows(tensor.how.block_rows),
        block_cols(tensor.how.block_cols),
        blocks_across(tensor.scales.dim(1)),
        rule(tensor.how.code_rule()),
        range(tensor.how.range),
        by_amax(with_element(tensor.how.format, [&]<class E>() { return AmaxRule::of<E>(rule.scale, range); })) {}
  MANTISSA_HOST_DEVICE int64_t row_blocks() const { return ceil_div(rows, block_rows); }
  MANTISSA_HOST_DEVICE int64_t blocks() const { return row_blocks() * blocks_across; }
  // The end of the rows, and of the columns, of a block that begins here; the last block may be smaller.
  MANTISSA_HOST_DEVICE int64_t end_row(int64_t first) const { return first + block_rows < rows ? first + block_rows : rows; }
  MANTISSA_HOST_DEVICE int64_t end_col(int64_t first) const { return first + block_cols < cols ? first + block_cols : cols; }
};

// x [rows, cols] of either dtype, and zeros below, element by element.
struct Source {
  const void* values;
  bool fp32;
  int64_t rows, cols;

  __device__ uint32_t bits(int64_t row, int64_t col) const {
    if (row >= rows) return 0U;
    const int64_t i = row * cols + col;
    return fp32 ? static_cast<const uint32_t*>(values)[i] : static_cast<const bf16*>(values)[i].bits << 16;
  }
};

// The scale of a block with this key. If all its elements decide, each(add) calls add(bits) for those of this thread, and joined(sum) adds
// the sums of the threads that share the block.
template <class E, class Each, class Joined>
__device__ uint8_t scale_of(const Codes& to, uint32_t key, const Each& each, const Joined& joined) {
  const uint32_t amax = amax_of_key(key);
  if constexpr (searches_scale<E>(ScaleRule::mse)) {
    if (to.rule.scale == ScaleRule::mse) {
      if constexpr (E::two_levels) {
        const int32_t exponent = to.rule.tensor_exponent;
        return E::searched_scale(amax, exponent, [&](uint8_t at) {
          int64_t sum = 0;
          each([&](uint32_t bits) { sum += E::squared_error(bits, amax, at, exponent); });
          return joined(sum);
        });
      } else {
        ScaleErrors errors;
        each([&](uint32_t bits) { errors.add(bits, amax); });
        return searched_scale<E>(amax, {joined(errors.below), joined(errors.above)}, to.range);
      }
    }
  }
  return block_scale<E>(amax, to.rule, to.range);
}

struct Alone {
  __device__ int64_t operator()(int64_t sum) const { return sum; }
};
struct JoinWarp {
  __device__ int64_t operator()(int64_t sum) const { return join_warp(sum, Plus<int64_t>()); }
};

// Joins keys of both halves over lanes whose numbers differ in bits [kFrom, kTo).
template <unsigned kFrom, unsigned kTo>
__device__ uint32_t join_lanes(uint32_t keys) {
  MANTISSA_UNROLL
  for (unsigned lanes = kFrom; lanes < kTo; lanes *= 2) keys = largest_halves(keys, shuffle_xor(keys, lanes));
  return keys;
}

// The keys of two packs, one in each half.
template <bool kFlashinfer>
__device__ uint32_t keys_of_packs(const Words& low, const Words& high) {
  const auto keys = [](const Words& words) {
    uint32_t out = amax_keys<kFlashinfer>(words.words[0]);
    MANTISSA_UNROLL
    for (unsigned w = 1; w < kPack / 2; ++w) out = largest_halves(out, amax_keys<kFlashinfer>(words.words[w]));
    return out;
  };
  const uint32_t a = keys(low), b = keys(high);
  return largest_halves((a & 0xffffU) | b << 16, a >> 16 | (b & 0xffff0000U));
}
__device__ inline uint32_t half_of(uint32_t two, unsigned i) { return i % 2 == 0 ? two & 0xffffU : two >> 16; }

// Quantizes rows of whole blocks from bf16. The packs of all rows are one sequence, and a thread has kPacksOfThread of them.
constexpr unsigned kPacksOfThread = 4, kPacksOfBlock = kThreads * kPacksOfThread;
template <class E, unsigned kBlock, bool kFlashinfer>
__global__ void __launch_bounds__(kThreads) quantize_rows(const bf16* x, int64_t packs_of_x, Codes to, int64_t packs) {
  constexpr unsigned kLanes = kBlock / kPack;
  const int64_t first = block() * kPacksOfBlock + thread();
  const bf16* const from = x + first * kPack;
  const auto left = [&](int64_t count) { return static_cast<int>(count - first < kPacksOfBlock ? count - first : kPacksOfBlock); };
  const int left_of_x = left(packs_of_x), left_of_all = left(packs);
  Words words[kPacksOfThread];
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPacksOfThread; ++i) {
    const int pack = static_cast<int>(i * kThreads);
    words[i] = pack < left_of_x ? load<Words>(from + pack * int64_t{kPack}) : Words{};
  }
  auto* const codes = reinterpret_cast<PackOfCodes<E>*>(to.codes) + first;
  uint8_t* const scales = to.scales + first / kLanes;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPacksOfThread; ++i) {
    const int pack = static_cast<int>(i * kThreads);
    const uint32_t keys = join_lanes<1, kLanes>(keys_of_packs<kFlashinfer>(words[i / 2 * 2], words[i / 2 * 2 + 1]));
    const auto [scale, factor] = [&] {
      if constexpr (E::two_levels)
        return scale_of_nvfp4(half_of(keys, i) << 16, to.rule.tensor_exponent);
      else
        return scale_of_half<E, kFlashinfer>(to.by_amax, half_of(keys, i));
    }();
    PackOfCodes<E> out = encoded<E>(words[i], factor);
    if (pack >= left_of_all) continue;
    if (kFlashinfer && !are_ordinary(words[i], scale)) {
      out = {};
      for (unsigned c = 0; c < kPack; ++c) {
        const uint32_t bits = pack < left_of_x ? uint32_t{from[pack * int64_t{kPack} + c].bits} << 16 : 0U;
        out.put(c, encode_in_block<E>(bits, static_cast<uint8_t>(scale), ScaleRule::flashinfer));
      }
    }
    store(codes + pack, out);
    if (thread() % kLanes == 0) scales[pack / static_cast<int>(kLanes)] = static_cast<uint8_t>(scale);
  }
}

// Blocks that are columns or tiles, of 32 or of 128 elements along a side: bf16, or codes that are requantized, which a thread reads once.
// It has eight columns of consecutive rows. kInRows and kInColumns may come together; kTurned writes columns as rows of the transpose.
constexpr unsigned kInRows = 1, kInColumns = 2, kInTiles = 4, kTurned = 8;
constexpr unsigned kHeldWarps = 4, kHeldThreads = kHeldWarps * kWarp;

template <unsigned kBlock>
struct Share {
  static constexpr unsigned kAcross = kBlock == 32 ? 8 : 4, kRows = kBlock == 32 ? 8 : 16;  // lanes side by side; rows of a thread
  static constexpr unsigned kCols = kHeldWarps * kAcross * kPack;                           // columns of a block of threads
  static_assert(kWarp / kAcross * kRows == kBlock);
  int64_t row, col;  // place of the thread's first element

  __device__ explicit Share(int64_t cols) {
    const auto index = static_cast<uint32_t>(block()), across = (static_cast<uint32_t>(cols) + kCols - 1) / kCols;
    row = int64_t{index / across * kBlock + lane() / kAcross * kRows};
    col = int64_t{index % across * kCols + (warp() * kAcross + lane() % kAcross) * kPack};
  }
  __device__ uint32_t row_block() const { return static_cast<uint32_t>(row) / kBlock; }
  __device__ uint32_t col_block() const { return static_cast<uint32_t>(col) / kBlock; }
  static Grid grid(int64_t rows, int64_t cols) { return {ceil_div(rows, int64_t{kBlock}) * ceil_div(cols, int64_t{kCols}), kHeldThreads}; }
};

template <class T, class Own>
__device__ RowsOfThread<T> rows_of_thread(T* values, int64_t rows, int64_t pitch, bool has, const Own& own) {
  const int64_t left = rows - own.row;
  return {values + own.row * pitch, static_cast<uint32_t>(pitch),
          !has || left < 0 ? 0 : static_cast<int>(left < Own::kRows ? left : Own::kRows)};
}

struct HeldValues {
  const bf16* values;
  int64_t rows, cols;

  // Zeros where there are no elements.
  template <class Own>
  __device__ void read(const Own& own, Words (&words)[Own::kRows], bool& /*extreme*/) const {
    const auto from = rows_of_thread(values + own.col, rows, cols, own.col < cols, own);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < Own::kRows; ++i) words[i] = from.has(i) ? load<Words>(from[i]) : Words{};
  }
};

// Codes as bf16, which has their values unless one that is not zero has an extreme scale.
template <class E, unsigned kBlock>
struct HeldCodes {
  CodesToRead<E> matrix;
  int64_t rows, cols;

  explicit HeldCodes(const QuantizedTensor& tensor) : matrix(tensor), rows(tensor.shape[0]), cols(tensor.shape[1]) {}
  template <class Own>
  __device__ void read(const Own& own, Words (&words)[Own::kRows], bool& extreme) const {
    const auto from = rows_of_thread(matrix.codes + own.col, rows, cols, own.col < cols, own);
    const auto scales = rows_of_thread(matrix.scales + own.col_block(), rows, matrix.blocks_across, own.col < cols, own);
    PackOfCodes<E> codes[Own::kRows];
    uint32_t scale[Own::kRows];
    MANTISSA_UNROLL
    for (unsigned i = 0; i < Own::kRows; ++i) {
      codes[i] = from.has(i) ? load<PackOfCodes<E>>(from[i]) : PackOfCodes<E>{};
      scale[i] = scales.has(i) ? *scales[i] : 127U;
    }
    MANTISSA_UNROLL
    for (unsigned i = 0; i < Own::kRows; ++i) {
      const float power = power_of(scale[i]);  // Inf for 255, whose products have no finite amax
      const Pack pack = elements_of(codes[i]);
      MANTISSA_UNROLL
      for (unsigned c = 0; c < kPack; c += 2) words[i].words[c / 2] = pack_bf16(pack.at[c] * power, pack.at[c + 1] * power);
      extreme = extreme || (extreme_scale<E>(static_cast<uint8_t>(scale[i])) && scale[i] != kScaleNan && any_nonzero(codes[i]));
    }
  }
};

// Keys of the warps of a block, for blocks of elements that several of them have.
template <unsigned kWords>
struct KeysOfWarps {
  uint32_t at[kHeldWarps][kWords];
};
template <unsigned kWords>
__device__ void join_warps(uint32_t (&keys)[kWords], unsigned first, bool writes, KeysOfWarps<kWarp / 4 * kWords>& shared) {
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kWords; ++i) {
    if (writes) shared.at[warp()][first + i] = keys[i];
  }
  barrier();
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kWords; ++i) {
    MANTISSA_UNROLL
    for (unsigned w = 0; w < kHeldWarps; ++w) keys[i] = largest_halves(keys[i], shared.at[w][first + i]);
  }
}

// Places for a thread's codes.
template <class E, class Own>
__device__ RowsOfThread<uint8_t> codes_of_thread(const Codes& to, const Own& own) {
  return rows_of_thread(to.codes + own.col / E::codes_per_byte, to.rows, to.cols / E::codes_per_byte, own.col < to.cols, own);
}

template <class E, unsigned kBlock, class Own>
__device__ void write_rows(const Codes& to, const Own& own, const Words (&words)[Own::kRows]) {
  constexpr unsigned kLanes = kBlock / kPack;
  constexpr bool kOfWarps = kLanes > Own::kAcross;
  uint32_t keys[Own::kRows / 2];  // two rows in each
  MANTISSA_UNROLL
  for (unsigned i = 0; i < Own::kRows; i += 2)
    keys[i / 2] = join_lanes < 1, kOfWarps ? Own::kAcross : kLanes > (keys_of_packs<false>(words[i], words[i + 1]));
  const unsigned place = lane() % Own::kAcross;
  if constexpr (kOfWarps)
    join_warps(keys, lane() / Own::kAcross * (Own::kRows / 2), place == 0, block_shared<KeysOfWarps<kWarp / 4 * (Own::kRows / 2)>>());
  const bool writes_scales = place % kLanes == 0 && own.col < to.cols && (!kOfWarps || warp() == 0);
  const auto codes = codes_of_thread<E>(to, own);
  const auto scales = rows_of_thread(to.scales + own.col_block(), to.rows, to.blocks_across, writes_scales, own);
  MANTISSA_UNROLL
  for (unsigned i = 0; i < Own::kRows; ++i) {
    const auto [scale, inverse] = scale_of_half<E, false>(to.by_amax, half_of(keys[i / 2], i));
    if (codes.has(i)) store(codes[i], encoded<E>(words[i], inverse));
    if (scales.has(i)) *scales[i] = static_cast<uint8_t>(scale);
  }
}

// Writes columns as rows of `to`, 16 elements by a thread.
template <class E, class Own>
__device__ void write_turned(const Codes& to, const Own& own, const Words (&words)[Own::kRows], const float (&inverses)[kPack]) {
  static_assert(Own::kRows == 16);
  MANTISSA_UNROLL
  for (unsigned c = 0; c < kPack; ++c) {
    PackInMemory<bf16> out;  // 16 bytes
    MANTISSA_UNROLL
    for (unsigned i = 0; i < Own::kRows; i += 4) {
      const auto scaled = [&](unsigned row) {
        const uint32_t two = words[row].words[c / 2];
        return (c % 2 == 0 ? low_value(two) : high_value(two)) * inverses[c];
      };
      out.words[i / 4] = encode_fp8<E>(scaled(i), scaled(i + 1), scaled(i + 2), scaled(i + 3));
    }
    if (own.col + c < to.rows && own.row < to.cols) store(to.codes + (own.col + c) * to.cols + own.row, out);
  }
}

template <class E, bool kTurns, class Own>
__device__ void write_columns(const Codes& to, const Own& own, const Words (&words)[Own::kRows]) {
  uint32_t keys[kPack / 2] = {};
  MANTISSA_UNROLL
  for (const Words& row : words) {
    MANTISSA_UNROLL
    for (unsigned w = 0; w < kPack / 2; ++w) keys[w] = largest_halves(keys[w], row.words[w] & kMagnitudes);
  }
  PackOfCodes<E4M3> scales{};  // bytes
  float inverses[kPack];
  MANTISSA_UNROLL
  for (unsigned c = 0; c < kPack; ++c) {
    if (c % 2 == 0) keys[c / 2] = join_lanes<Own::kAcross, kWarp>(keys[c / 2]);
    const ScaleOfBlock scale = scale_of_half<E, false>(to.by_amax, half_of(keys[c / 2], c));
    inverses[c] = scale.factor;
    scales.put(c, scale.code);
  }
  const bool first = lane() < Own::kAcross;
  if constexpr (kTurns) {
    write_turned<E>(to, own, words, inverses);
    MANTISSA_UNROLL
    for (unsigned c = 0; c < kPack; ++c) {
      if (first && own.col + c < to.rows) to.scales[(own.col + c) * to.blocks_across + own.row_block()] = scales.at(c);
    }
  } else {
    const auto codes = codes_of_thread<E>(to, own);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < Own::kRows; ++i) {
      if (codes.has(i)) store(codes[i], encoded<E>(words[i], inverses));
    }
    if (first && codes.has(0)) store(to.scales + int64_t{own.row_block()} * to.cols + own.col, scales);
  }
}

template <class E, unsigned kBlock, bool kTurns, class Own>
__device__ void write_tiles(const Codes& to, const Codes& turned, const Own& own, const Words (&words)[Own::kRows]) {
  uint32_t keys[1] = {};
  MANTISSA_UNROLL
  for (const Words& row : words) {
    MANTISSA_UNROLL
    for (unsigned w = 0; w < kPack / 2; ++w) keys[0] = largest_halves(keys[0], row.words[w] & kMagnitudes);
  }
  constexpr unsigned kLanes = kBlock / kPack < Own::kAcross ? kBlock / kPack : Own::kAcross;  // beside each other in a tile
  keys[0] = join_lanes<Own::kAcross, kWarp>(join_lanes<1, kLanes>(keys[0]));
  if constexpr (kBlock / kPack > Own::kAcross) join_warps(keys, 0, lane() == 0, block_shared<KeysOfWarps<kWarp / 4>>());
  const auto [scale, inverse] = scale_of_half<E, false>(to.by_amax, Largest<uint32_t>()(half_of(keys[0], 0), half_of(keys[0], 1)));
  const auto codes = codes_of_thread<E>(to, own);
  MANTISSA_UNROLL
  for (unsigned i = 0; i < Own::kRows; ++i) {
    if (codes.has(i)) store(codes[i], encoded<E>(words[i], inverse));
  }
  const bool first = own.row % kBlock == 0 && own.col % kBlock == 0 && codes.has(0);
  if (first) to.scales[own.row_block() * to.blocks_across + own.col_block()] = static_cast<uint8_t>(scale);
  if constexpr (kTurns) {
    write_turned<E>(turned, own, words, {inverse, inverse, inverse, inverse, inverse, inverse, inverse, inverse});
    if (first) turned.scales[own.col_block() * turned.blocks_across + own.row_block()] = static_cast<uint8_t>(scale);
  }
}

// Quantizes the columns of a pack by integers.
template <class E, unsigned kBlock, unsigned kWays, class From>
__device__ void write_columns_exactly(const From& from, const Codes& to, int64_t first_row, int64_t col) {
  constexpr bool kTurns = (kWays & kTurned) != 0;
  const int64_t rows = kTurns ? to.cols : to.rows, cols = kTurns ? to.rows : to.cols;
  const int64_t end = first_row + kBlock < rows ? first_row + kBlock : rows, block_row = first_row / kBlock;
  const auto column = [&](const auto& visit) {
    for (int64_t row = first_row; row < end; ++row) visit(row, row < from.rows ? from.matrix.bits(row, col) : 0U);
  };
  if (col >= cols) return;
  uint32_t amax = 0;
  column([&](int64_t, uint32_t bits) { amax = Largest<uint32_t>()(amax, bits & ~kFp32Sign); });
  const auto scale = static_cast<uint8_t>(to.by_amax.scale(amax));
  column([&](int64_t row, uint32_t bits) {
    to.codes[kTurns ? col * to.cols + row : row * to.cols + col] = encode_in_block<E>(bits, scale, ScaleRule::rceil);
  });
  to.scales[kTurns ? col * to.blocks_across + block_row : block_row * to.cols + col] = scale;
}

template <class E, unsigned kBlock, unsigned kWays, class From>
__global__ void __launch_bounds__(kHeldThreads) quantize_held(From from, Codes to, Codes second) {
  using Own = Share<kBlock>;
  constexpr bool kTurns = (kWays & kTurned) != 0;
  const Own own(from.cols);
  Words words[Own::kRows];
  bool extreme = false;
  from.read(own, words, extreme);
  if constexpr (!std::is_same_v<From, HeldValues>) {
    static_assert((kWays & (kInRows | kInTiles)) == 0);  // a warp has blocks of its own
    if (ballot(extreme) != 0) {
      const int64_t first_row = own.row - lane() / Own::kAcross * Own::kRows, first_col = own.col - lane() % Own::kAcross * kPack;
      for (unsigned c = lane(); c < Own::kAcross * kPack; c += kWarp)
        write_columns_exactly<E, kBlock, kWays>(from, second, first_row, first_col + c);
      return;
    }
  }
  if constexpr ((kWays & kInRows) != 0) write_rows<E, kBlock>(to, own, words);
  if constexpr ((kWays & kInTiles) != 0) write_tiles<E, kBlock, kTurns>(to, second, own, words);
  if constexpr ((kWays & kInColumns) != 0) write_columns<E, kTurns>(second, own, words);
}

// A warp has a block of the format, whose rows fill whole bytes. A lane has every 32nd byte.
template <class E>
__global__ void __launch_bounds__(kThreads) quantize(Source from, Codes to) {
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
    for (int64_t i = 0; i < kEach; ++i) key = Largest<uint32_t>()(key, amax_key(element(byte, i), to.rule.scale));
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
      each([&](uint32_t bits) { key = Largest<uint32_t>()(key, amax_key(bits, to.rule.scale)); });
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

bool in_packs(const Codes& to) { return to.cols % kPack == 0 && begins_at(to.codes, kPack) && begins_at(to.scales, kPack); }

// Returns true if quantize_held() writes blocks of this length.
bool has_block(int64_t block) { return block == 32 || block == 128; }

// Calls launched(kernel) with the kernel for whole rows of such blocks and returns true, if there is one.
template <class E>
bool launch_rows(const Codes& to, const auto& launched) {
  if (to.block_rows != 1 || to.cols % to.block_cols != 0 || searches_scale<E>(to.rule.scale)) return false;
  if constexpr (E::two_levels) {
    return launched(quantize_rows<E, kNvfp4Block, false>), true;
  } else {
    if (!has_block(to.block_cols)) return false;
    if constexpr (E::codes_per_byte == 2) {
      if (to.rule.scale == ScaleRule::flashinfer)
        return launched(to.block_cols == 32 ? quantize_rows<E, 32, true> : quantize_rows<E, 128, true>), true;
    }
    return launched(to.block_cols == 32 ? quantize_rows<E, 32, false> : quantize_rows<E, 128, false>), true;
  }
}

// Calls launched(kernel, grid) with the kernel for blocks that threads hold, rows only with a second place, and returns true, if there is
// one.
enum class Second : uint8_t { none, columns, transposed };
template <class E>
bool launch_held(const Codes& to, Second second, const auto& launched) {
  const bool tiles = to.block_rows == to.block_cols, columns = to.block_cols == 1;
  if (E::codes_per_byte == 2 || !has_block(std::max(to.block_rows, to.block_cols)) || to.cols > kMostCols) return false;
  if (!tiles && !columns && second == Second::none) return false;
  if (second == Second::transposed && (to.block_cols != 128 || to.rows % 16 != 0)) return false;
  if constexpr (E::codes_per_byte == 1) {
    const auto launch_block = [&]<unsigned kBlock>() {
      const Grid grid = Share<kBlock>::grid(to.rows, to.cols);
      if (second == Second::columns) return launched(quantize_held<E, kBlock, kInRows | kInColumns, HeldValues>, grid);
      if constexpr (kBlock == 128) {
        if (second == Second::transposed) return launched(quantize_held<E, 128, kInRows | kInColumns | kTurned, HeldValues>, grid);
      }
      launched(tiles ? quantize_held<E, kBlock, kInTiles, HeldValues> : quantize_held<E, kBlock, kInColumns, HeldValues>, grid);
    };
    std::max(to.block_rows, to.block_cols) == 32 ? launch_block.template operator()<32>() : launch_block.template operator()<128>();
  }
  return true;
}

}  // namespace

void CudaBackend::execute(const Quantize& k) {
  const bool transposes = k.second.defined() && k.second.how.rowwise();
  const bool fp32 = k.x.dtype() == Dtype::f32;
  const Source from{k.x.device_bytes(), fp32, k.x.dim(0), k.x.dim(1)};
  const auto in_packs_of_bf16 = [&](const Codes& to) { return !fp32 && in_packs(to) && begins_at(from.values, 16); };
  with_any_element(k.out.how.format, [&]<class E>() {
    const auto launch_each = [&](const Codes& to) {
      if constexpr (!E::two_levels) {
        if (to.block_cols == 1 || to.block_cols % E::codes_per_byte != 0)
          return launch(quantize_alone<E, Source>, {blocks_for(groups_of_blocks<E>(to)), kThreads}, from, to);
      }
      launch(quantize<E>, {ceil_div(to.blocks(), int64_t{kWarpsOfBlock}), kThreads}, from, to);
    };
    const auto launch_best = [&](const QuantizedTensor& out) {
      const Codes to(out);
      const auto rows = [&](auto* kernel) {
        const int64_t packs = to.rows * to.cols / kPack;
        launch(kernel, {ceil_div(packs, int64_t{kPacksOfBlock}), kThreads}, k.x.device_data<bf16>(), k.x.elements() / kPack, to, packs);
      };
      const auto held = [&](auto* kernel, Grid grid) { launch(kernel, grid, {k.x.device_data<bf16>(), from.rows, from.cols}, to, to); };
      if (!in_packs_of_bf16(to) || !(launch_rows<E>(to, rows) || launch_held<E>(to, Second::none, held))) launch_each(to);
    };
    const auto launch_both = [&](Second second) {
      const Codes rows(k.out), columns(k.second);
      const bool holds = in_packs_of_bf16(rows) && in_packs_of_bf16(columns) && (!transposes || begins_at(columns.codes, 16));
      return holds && launch_held<E>(rows, second, [&](auto* kernel, Grid grid) {
               launch(kernel, grid, {k.x.device_data<bf16>(), from.rows, from.cols}, rows, columns);
             });
    };
    if (k.second.defined() && launch_both(transposes ? Second::transposed : Second::columns)) return;
    launch_best(k.out);
    if (!k.second.defined()) return;
    if (!transposes) return launch_best(k.second);
    const QuantizedTensor columns = empty_quantized(*this, k.out.shape, k.out.how.transposed());
    launch_best(columns);
    transpose(columns, k.second);
  });
  if (!k.nonfinite.defined()) return;
  with_values(k.x.dtype(), [&]<class T>() {
    launch(find_nonfinite<T>, {blocks_for_packs(k.x.elements()), kThreads}, packs_of<const T>(k.x), k.nonfinite.device_data<int32_t>());
  });
}

void CudaBackend::execute(const RequantizeColumns& k) {
  const Codes to(k.out);
  const bool transposes = k.out.how.rowwise(), in_words = in_packs(to) && begins_at(k.x.codes.device_bytes(), kPack);
  const bool holds = in_words && k.x.shape[1] % kPack == 0 && k.x.shape[1] <= kMostCols;
  const auto launch_held = [&]<class E, unsigned kBlock, unsigned kWays>() {
    launch(quantize_held<E, kBlock, kWays, HeldCodes<E, kBlock>>, Share<kBlock>::grid(k.x.shape[0], k.x.shape[1]),
           HeldCodes<E, kBlock>(k.x), to, to);
  };
  const auto requantize = [&]<class E>() {
    if (transposes && holds && k.x.how.block() == 128 && to.cols % 16 == 0 && begins_at(to.codes, 16))
      return launch_held.template operator()<E, 128, kInColumns | kTurned>();
    if (transposes) {
      const QuantizedTensor columns = empty_quantized(*this, k.x.shape, k.x.how.transposed());
      execute(RequantizeColumns{.x = k.x, .out = columns});
      return transpose(columns, k.out);
    }
    if (holds && k.x.how.block() == 32) return launch_held.template operator()<E, 32, kInColumns>();
    if (holds && k.x.how.block() == 128) return launch_held.template operator()<E, 128, kInColumns>();
    launch(quantize_alone<E, CodesToRead<E>>, {blocks_for(groups_of_blocks<E>(to)), kThreads}, CodesToRead<E>(k.x), to);
  };
  k.x.how.format == Format::e4m3 ? requantize.template operator()<E4M3>() : requantize.template operator()<E5M2>();
}

}  // namespace mantissa
