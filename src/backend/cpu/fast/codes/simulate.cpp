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
class Source {
 public:
  explicit Source(const Simulate& k)
      : x_(k.x.device_data<X>()), out_(k.out.device_data<T>()), given_(k.x.dim(0)), rows_(k.out.dim(0)), columns_(k.out.dim(1)) {}

  void copy() const {
    parallel_for(rows_, rows_per_piece(columns_), [&](int64_t begin, int64_t end) {
      const int64_t copied = std::clamp<int64_t>(given_ - begin, 0, end - begin);
      if (copied > 0) cloned<simd::convert<X, T>>(x_ + begin * columns_, out_ + begin * columns_, copied * columns_);
      std::fill(out_ + (begin + copied) * columns_, out_ + end * columns_, T{});
    });
  }
  void transform_columns(int64_t length) const {
    parallel_for(rows_ / length, std::max<int64_t>(1, rows_per_piece(columns_) / length), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * length; row < end * length; row += length) {
        const int64_t given = std::clamp<int64_t>(given_ - row, 0, length);
        for (int64_t c = 0; c < columns_; c += kTogether) {
          const int64_t first = row * columns_ + c;
          cloned<transform_blocks<X, T, true>>(
              given > 0 ? x_ + first : x_, out_ + first,
              {.length = length, .stride = columns_, .given = given, .count = std::min(kTogether, columns_ - c)});
        }
      }
    });
  }
  void transform_rows(int64_t length) const {
    parallel_for(rows_, rows_per_piece(columns_), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t blocks = columns_ / length, given = row < given_ ? length : 0;
        for (int64_t b = 0; b < blocks; b += kTogether) {
          const int64_t first = row * columns_ + b * length;
          cloned<transform_blocks<X, T, false>>(given > 0 ? x_ + first : x_, out_ + first,
                                                {.length = length, .stride = 1, .given = given, .count = std::min(kTogether, blocks - b)});
        }
      }
    });
  }

 private:
  const X* x_;
  T* out_;
  int64_t given_, rows_, columns_;
};

template <class X, class T>
void write_source(const Simulate& k) {
  const Source<X, T> source(k);
  if (k.how.hadamard == 0) return source.copy();
  k.how.contraction == 0 ? source.transform_columns(k.how.hadamard) : source.transform_rows(k.how.hadamard);
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

template <class T>
auto row_kernel(const Simulation& how) {
  const bool random = how.rounding == Rounding::stochastic;
  if (how.scale == SimulatedScale::e4m3) return random ? cloned<round_row<T, true, true>> : cloned<round_row<T, true, false>>;
  return random ? cloned<round_row<T, false, true>> : cloned<round_row<T, false, false>>;
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

// Rounds `out` in place, by row blocks.
template <class T>
class RowRounder {
 public:
  explicit RowRounder(const Simulate& k) : k_(k), out_(k.out.device_data<T>()), rows_(k.out.dim(0)), columns_(k.out.dim(1)) {}

  void run() {
    const int64_t row_blocks = ceil_div(rows_, k_.how.block_rows);
    keys_.resize(static_cast<size_t>(row_blocks * across()));
    for_row_blocks([&](int64_t row_block, Row& row) { measure(row_block, row); });
    for (const uint32_t key : keys_) tensor_amax_ = std::max(tensor_amax_, amax_of_key(key));
    for_row_blocks([&](int64_t row_block, Row& row) { round(row_block, row); });
  }

 private:
  template <class Body>
  void for_row_blocks(const Body& body) const {
    parallel_for(ceil_div(rows_, k_.how.block_rows), std::max<int64_t>(1, rows_per_piece(columns_) / k_.how.block_rows),
                 [&](int64_t begin, int64_t end) {
                   Row& row = Row::of(columns_);
                   for (int64_t row_block = begin; row_block < end; ++row_block) body(row_block, row);
                 });
  }
  int64_t across() const { return ceil_div(columns_, k_.how.block_cols); }
  int64_t end_of(int64_t row_block) const { return std::min(rows_, (row_block + 1) * k_.how.block_rows); }
  uint32_t* keys(int64_t row_block) { return keys_.data() + row_block * across(); }
  // Calls body(block, first column, end) for the blocks of a row block.
  template <class Body>
  void for_blocks(const Body& body) const {
    for (int64_t i = 0; i < across(); ++i) body(i, i * k_.how.block_cols, std::min(columns_, (i + 1) * k_.how.block_cols));
  }

  void measure(int64_t row_block, Row& room) {
    std::fill_n(room.keys.data(), columns_, 0U);
    for (int64_t r = row_block * k_.how.block_rows; r < end_of(row_block); ++r)
      cloned<add_keys<T>>(out_ + r * columns_, columns_, k_.how.rule, room.keys.data());
    for_blocks([&](int64_t i, int64_t begin, int64_t end) {
      keys(row_block)[i] = *std::max_element(room.keys.data() + begin, room.keys.data() + end);
    });
  }

  SimulatedBlock scale(uint32_t key) const {
    return k_.how.scale == SimulatedScale::e8m0
               ? SimulatedBlock::of_one_level(amax_of_key(key), k_.how)
               : SimulatedBlock::of_two_levels(amax_of_key(key), tensor_amax_, static_cast<float>(grid_.largest));
  }

  void round(int64_t row_block, Row& room) {
    Grid grid = grid_;
    for_blocks([&](int64_t i, int64_t begin, int64_t end) {
      const SimulatedBlock scale = this->scale(keys(row_block)[i]);
      std::fill(room.encode.data() + begin, room.encode.data() + end, scale.encode());
      std::fill(room.decode.data() + begin, room.decode.data() + end, scale.decode());
      grid.tensor = scale.tensor();
    });
    const bool random = k_.how.rounding == Rounding::stochastic;
    const auto kernel = row_kernel<T>(k_.how);
    for (int64_t r = row_block * k_.how.block_rows; r < end_of(row_block); ++r)
      kernel(out_ + r * columns_, columns_, {room.encode.data(), room.decode.data(), random ? draw(r, room) : room.words.data()}, grid);
  }

  // Returns the words of a row.
  const uint32_t* draw(int64_t row, Row& room) const {
    ElementWords words(k_.draws);
    const uint64_t first = words.number(row, 0), skipped = first % 4;
    const bool wraps = first > ~uint64_t{0} - static_cast<uint64_t>(columns_);
    if (!k_.draws.column_places.empty() || wraps) {
      for (int64_t c = 0; c < columns_; ++c) room.words[static_cast<size_t>(c)] = words(row, c);
      return room.words.data();
    }
    cloned<draw_range>({k_.draws.seed, RngStream::rounding}, k_.draws.what, first / 4, room.words.data(),
                       ceil_div(static_cast<int64_t>(skipped) + columns_, int64_t{4}));
    return room.words.data() + skipped;
  }

  const Simulate& k_;
  const Grid grid_{k_.how.element};
  T* out_;
  int64_t rows_, columns_;
  std::vector<uint32_t> keys_;  // keys of the amax of each block
  uint32_t tensor_amax_ = 0;
};

}  // namespace

void CpuBackend::execute(const Simulate& k) {
  if (k.error.defined()) return CpuReference::execute(k);
  with_dtypes(k, [&]<class X, class T>() {
    write_source<X, T>(k);
    RowRounder<T>(k).run();
  });
}

}  // namespace mantissa
