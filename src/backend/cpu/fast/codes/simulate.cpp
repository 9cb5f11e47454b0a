// Rounding to formats without codes row by row, in vectors of fp64, with the bits of reference/simulate.cpp.
#include <algorithm>
#include <bit>
#include <vector>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/rows/philox_lanes.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/simulated_rows.h"
#include "base/parallel.h"
#include "mantissa/base/rng.h"
#include "mantissa/formats/hadamard.h"

namespace mantissa {
namespace {

constexpr int64_t kTogether = 64;  // elements, in loops that g++ vectorizes

// The grid of elements, which is the same for all elements of a matrix.
struct Grid {
  double largest, least_normal;  // elements
  double step;                   // the distance of elements of one binade, in binades
  float tensor = 1.0F;           // see SimulatedBlock

  explicit Grid(const FreeElement& element)
      : largest(ElementGrid(element).largest()),
        least_normal(power_of_two(1 - element.bias())),
        step(power_of_two(-element.mantissa_bits)) {}
};

// The scales of the blocks of a row's elements, and the elements' random words.
struct RowScales {
  const double *encode, *decode;
  const uint32_t* words;
};

// Rounds kTogether elements in place. A sum with 1.5 * 2^52 steps has no digits below a step: so what is added rounds to whole steps, ties
// to even.
template <bool kTwoLevels, bool kRandom>
[[gnu::always_inline]] inline void round_together(float* x, const RowScales& of, const Grid& grid) {
  for (int64_t j = 0; j < kTogether; ++j) {
    const double scaled = kTwoLevels ? double{x[j] * static_cast<float>(of.encode[j])} : double{x[j]} * of.encode[j];
    const double given = __builtin_fabs(scaled), magnitude = given < grid.largest ? given : grid.largest;
    const double normal = magnitude > grid.least_normal ? magnitude : grid.least_normal;
    const auto binade = std::bit_cast<double>(std::bit_cast<uint64_t>(normal) & 0x7FF0000000000000U);
    const double step = binade * grid.step, rounder = 0x1.8p52 * step;
    double element = (magnitude + rounder) - rounder;
    if constexpr (kRandom) {
      const double below = element > magnitude ? element - step : element;
      element = magnitude - below > static_cast<double>(of.words[j]) * 0x1p-32 * step ? below + step : below;
    }
    x[j] = static_cast<float>(__builtin_copysign(element, scaled) * of.decode[j]) * grid.tensor;
  }
}

// Scales and words have kTogether elements more than the row.
template <class T, bool kTwoLevels, bool kRandom>
[[gnu::always_inline]] inline void round_row(T* row, int64_t n, RowScales of, Grid grid) {
  alignas(64) float x[kTogether] = {};
  for (int64_t c = 0; c < n; c += kTogether) {
    const int64_t count = n - c < kTogether ? n - c : kTogether;
    simd::convert(row + c, x, count);
    round_together<kTwoLevels, kRandom>(x, {of.encode + c, of.decode + c, of.words + c}, grid);
    simd::convert(x, row + c, count);
  }
}

// Blocks side by side that are transformed: element i of block b lies at i * stride + b, or, of blocks along rows, at i + b * length.
struct Blocks {
  int64_t length, stride;
  int64_t given;  // elements of each; zeros behind them
  int64_t count;  // up to kTogether
};

// Rounds the sums to X, the type of the operand, before T.
template <class X, class T, bool kDown>
[[gnu::always_inline]] inline void transform_blocks(const X* x, T* out, Blocks of) {
  alignas(64) double all[32 * kTogether] = {};
  const auto place = [&](int64_t i, int64_t b) __attribute__((always_inline)) { return kDown ? i * of.stride + b : i + b * of.length; };
  for (int64_t i = 0; i < of.given; ++i)
    for (int64_t b = 0; b < of.count; ++b) all[i * kTogether + b] = double{widened(x[place(i, b)])};
  hadamard_transform<kTogether>(all, of.length);
  for (int64_t i = 0; i < of.length; ++i)
    for (int64_t b = 0; b < of.count; ++b) out[place(i, b)] = narrowed<T>(widened(narrowed<X>(static_cast<float>(all[i * kTogether + b]))));
}

// Writes x with rows of zeros behind it, transformed or not, to `out`.
template <class X, class T>
void write_source(const Simulate& k) {
  const X* x = k.x.device_data<X>();
  T* out = k.out.device_data<T>();
  const int64_t x_rows = k.x.dim(0), rows = k.out.dim(0), columns = k.out.dim(1), length = k.how.hadamard;
  if (length == 0) {
    return parallel_for(rows, rows_per_piece(columns), [&](int64_t begin, int64_t end) {
      const int64_t copied = std::clamp<int64_t>(x_rows - begin, 0, end - begin);
      if (copied > 0) cloned<simd::convert<X, T>>(x + begin * columns, out + begin * columns, copied * columns);
      std::fill(out + (begin + copied) * columns, out + end * columns, T{});
    });
  }
  if (k.how.contraction == 0) {
    return parallel_for(rows / length, std::max<int64_t>(1, rows_per_piece(columns) / length), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * length; row < end * length; row += length) {
        const int64_t given = std::clamp<int64_t>(x_rows - row, 0, length);
        for (int64_t c = 0; c < columns; c += kTogether) {
          const int64_t first = row * columns + c;
          cloned<transform_blocks<X, T, true>>(
              given > 0 ? x + first : x, out + first,
              {.length = length, .stride = columns, .given = given, .count = std::min(kTogether, columns - c)});
        }
      }
    });
  }
  parallel_for(rows, rows_per_piece(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t blocks = columns / length, given = row < x_rows ? length : 0;
      for (int64_t b = 0; b < blocks; b += kTogether) {
        const int64_t first = row * columns + b * length;
        cloned<transform_blocks<X, T, false>>(given > 0 ? x + first : x, out + first,
                                              {.length = length, .stride = 1, .given = given, .count = std::min(kTogether, blocks - b)});
      }
    }
  });
}

template <class T>
[[gnu::always_inline]] inline void add_keys(const T* row, int64_t n, ScaleRule rule, uint32_t* keys) {
  for (int64_t c = 0; c < n; ++c) {
    const uint32_t key = amax_key(fp32_bits(row[c]), rule);
    keys[c] = keys[c] > key ? keys[c] : key;
  }
}

// Writes the words of so many draws, each of which is of four elements beside each other; and more, up to whole kDrawsAtOnce draws. `index`
// is that of the first draw: a quarter of the number of its first element.
[[gnu::always_inline]] inline void draw_range(RngKey key, uint32_t what, uint64_t index, uint32_t* words, int64_t draws) {
  for (int64_t begin = 0; begin < draws; begin += kDrawsAtOnce) {
    DrawnWords<4> drawn;
    draw_words(key, what, index + static_cast<uint64_t>(begin), drawn);
    for (int64_t j = 0; j < kDrawsAtOnce; ++j) {
      for (int64_t word = 0; word < 4; ++word) words[4 * (begin + j) + word] = drawn.of[word][j];
    }
  }
}

// Room for a row.
struct Row {
  std::vector<double> encode, decode;
  std::vector<uint32_t> keys, words;

  // Returns the room of this thread, which stays.
  static Row& of(int64_t columns) {
    thread_local Row row;
    const auto size = static_cast<size_t>(columns + kTogether);
    if (row.encode.size() < size) {
      row.encode.resize(size);
      row.decode.resize(size);
      row.keys.resize(size);
      row.words.resize(size + size_t{4} * kDrawsAtOnce);
    }
    return row;
  }
};

// Returns the words of a row.
const uint32_t* draw(const Simulate& k, int64_t row, Row& room) {
  const int64_t columns = k.out.dim(1);
  ElementWords words(k.draws);
  const uint64_t first = words.number(row, 0), skipped = first % 4;
  const bool wraps = first > ~uint64_t{0} - static_cast<uint64_t>(columns);
  if (!k.draws.column_places.empty() || wraps) {
    for (int64_t c = 0; c < columns; ++c) room.words[static_cast<size_t>(c)] = words(row, c);
    return room.words.data();
  }
  cloned<draw_range>({k.draws.seed, RngStream::rounding}, k.draws.what, first / 4, room.words.data(),
                     ceil_div(static_cast<int64_t>(skipped) + columns, int64_t{4}));
  return room.words.data() + skipped;
}

// Rounds `out` in place, by row blocks.
template <class T>
void round(const Simulate& k) {
  const int64_t rows = k.out.dim(0), columns = k.out.dim(1), height = k.how.block_rows, width = k.how.block_cols;
  const int64_t row_blocks = ceil_div(rows, height), across = ceil_div(columns, width);
  T* out = k.out.device_data<T>();
  std::vector<uint32_t> keys(static_cast<size_t>(row_blocks * across));  // keys of the amax of each block
  // Calls body(first row, end, keys of the blocks, room) for each row block.
  const auto for_row_blocks = [&](const auto& body) {
    parallel_for(row_blocks, std::max<int64_t>(1, rows_per_piece(columns) / height), [&](int64_t begin, int64_t end) {
      Row& room = Row::of(columns);
      for (int64_t i = begin; i < end; ++i) body(i * height, std::min(rows, (i + 1) * height), keys.data() + i * across, room);
    });
  };
  for_row_blocks([&](int64_t first, int64_t end, uint32_t* block_keys, Row& room) {
    std::fill_n(room.keys.data(), columns, 0U);
    for (int64_t r = first; r < end; ++r) cloned<add_keys<T>>(out + r * columns, columns, k.how.rule, room.keys.data());
    for (int64_t i = 0; i < across; ++i) {
      block_keys[i] = *std::max_element(room.keys.data() + i * width, room.keys.data() + std::min(columns, (i + 1) * width));
    }
  });
  uint32_t tensor_amax = 0;
  for (const uint32_t key : keys) tensor_amax = std::max(tensor_amax, amax_of_key(key));
  const bool random = k.how.rounding == Rounding::stochastic, two_levels = k.how.scale == SimulatedScale::e4m3;
  const auto kernel = two_levels ? (random ? cloned<round_row<T, true, true>> : cloned<round_row<T, true, false>>)
                                 : (random ? cloned<round_row<T, false, true>> : cloned<round_row<T, false, false>>);
  const Grid element_grid(k.how.element);
  for_row_blocks([&](int64_t first, int64_t end, const uint32_t* block_keys, Row& room) {
    Grid grid = element_grid;
    for (int64_t i = 0; i < across; ++i) {
      const auto scale = SimulatedBlock::make(amax_of_key(block_keys[i]), tensor_amax, k.how, static_cast<float>(grid.largest));
      const int64_t begin = i * width, count = std::min(width, columns - begin);
      std::fill_n(room.encode.data() + begin, count, scale.encode());
      std::fill_n(room.decode.data() + begin, count, scale.decode());
      grid.tensor = scale.tensor();
    }
    for (int64_t r = first; r < end; ++r) {
      kernel(out + r * columns, columns, {room.encode.data(), room.decode.data(), random ? draw(k, r, room) : room.words.data()}, grid);
    }
  });
}

}  // namespace

void CpuBackend::execute(const Simulate& k) {
  if (k.error.defined()) return CpuReference::execute(k);
  with_dtypes(k, [&]<class X, class T>() {
    write_source<X, T>(k);
    round<T>(k);
  });
}

}  // namespace mantissa
