// Rounds to formats without codes: the values of free_rounding.h over scales of one or two levels.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/reference/reference.h"
#include "backend/cpu/simulated_rows.h"
#include "base/parallel.h"
#include "mantissa/formats/hadamard.h"

namespace mantissa {
namespace {

// The values to round: x with rows of zeros behind it, transformed or not, in `out`.
template <class X, class T>
void write_source(const Simulate& k) {
  const X* x = k.x.device_data<X>();
  T* out = k.out.device_data<T>();
  const int64_t rows = k.out.dim(0), columns = k.out.dim(1), length = k.how.hadamard;
  const auto read = [&](int64_t row, int64_t column) { return row < k.x.dim(0) ? widened(x[row * columns + column]) : 0.0F; };
  if (length == 0) {
    return parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t c = 0; c < columns; ++c) out[row * columns + c] = narrowed<T>(read(row, c));
      }
    });
  }
  const bool down = k.how.contraction == 0;
  const int64_t height = down ? length : 1, width = down ? 1 : length;
  parallel_for(rows / height, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * height; row < end * height; row += height) {
      for (int64_t column = 0; column < columns; column += width) {
        std::array<double, 32> block{};
        for (int64_t i = 0; i < length; ++i) {
          block[static_cast<size_t>(i)] = double{down ? read(row + i, column) : read(row, column + i)};
        }
        hadamard_transform(block.data(), length);
        for (int64_t i = 0; i < length; ++i) {
          const X rounded = narrowed<X>(static_cast<float>(block[static_cast<size_t>(i)]));
          out[row * columns + column + i * (down ? columns : 1)] = narrowed<T>(widened(rounded));
        }
      }
    }
  });
}

using ErrorSums = std::array<double, QuantizationError::size>;

void add_error(ErrorSums& sums, float x, float value, bool clipped) {
  using Part = QuantizationError::Part;
  const double error = double{x} - double{value};
  sums[Part::signal] += double{x} * double{x};
  sums[Part::noise] += error * error;
  sums[Part::clipped] += clipped ? 1.0 : 0.0;
  sums[Part::flushed] += x != 0.0F && value == 0.0F ? 1.0 : 0.0;
  sums[Part::amax] = std::isnan(x) ? double{x} : std::fmax(sums[Part::amax], double{std::fabs(x)});
  sums[Part::elements] += 1.0;
}

// Rounds `out` in place, by row blocks.
template <class T>
class Rounder {
 public:
  explicit Rounder(const Simulate& k) : k_(k), how_(k.how), out_(k.out.device_data<T>()), rows_(k.out.dim(0)), columns_(k.out.dim(1)) {}

  void run() {
    const int64_t row_blocks = ceil_div(rows_, how_.block_rows);
    keys_.resize(static_cast<size_t>(row_blocks * across()));
    parallel_for(row_blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row_block = begin; row_block < end; ++row_block) measure(row_block);
    });
    for (const uint32_t key : keys_) tensor_amax_ = std::max(tensor_amax_, amax_of_key(key));
    const auto round_blocks = [&](int64_t begin, int64_t end) {
      ElementWords words(k_.draws);
      for (int64_t row_block = begin; row_block < end; ++row_block) round(row_block, words);
    };
    if (!k_.error.defined()) return parallel_for(row_blocks, 1, round_blocks);
    round_blocks(0, row_blocks);
    std::ranges::copy(sums_, k_.error.template device_data<double>());
  }

 private:
  int64_t across() const { return ceil_div(columns_, how_.block_cols); }
  Block block(int64_t row_block, int64_t i) const {
    const int64_t row = row_block * how_.block_rows, column = i * how_.block_cols;
    return {row, std::min(how_.block_rows, rows_ - row), column, std::min(how_.block_cols, columns_ - column)};
  }
  uint32_t& key(int64_t row_block, int64_t i) { return keys_[static_cast<size_t>(row_block * across() + i)]; }

  void measure(int64_t row_block) {
    for (int64_t i = 0; i < across(); ++i) {
      uint32_t& most = key(row_block, i);
      for_each_element(block(row_block, i),
                       [&](int64_t r, int64_t c) { most = std::max(most, amax_key(fp32_bits(out_[r * columns_ + c]), how_.rule)); });
    }
  }

  void round(int64_t row_block, ElementWords& words) {
    for (int64_t i = 0; i < across(); ++i) {
      const SimulatedBlock scale =
          SimulatedBlock::make(amax_of_key(key(row_block, i)), tensor_amax_, how_, static_cast<float>(grid_.largest()));
      bool any = false;
      for_each_element(block(row_block, i), [&](int64_t r, int64_t c) {
        T& element = out_[r * columns_ + c];
        const float x = widened(element);
        element = narrowed<T>(rounded(x, scale, [&] { return words(r, c); }));
        if (!counts(r)) return;
        add_error(sums_, x, widened(element), std::fabs(scale.scaled(x)) > grid_.largest());
        any = true;
      });
      if (any) sums_[QuantizationError::scales + scale.exponent()] += 1.0;
    }
  }

  // Returns true if the error is wanted and this row counts.
  bool counts(int64_t row) const { return k_.error.defined() && (!rows_counted_ || rows_counted_[row] >= 0); }

  template <class Word>
  float rounded(float x, const SimulatedBlock& scale, const Word& word) const {
    if (scale.poisoned()) return std::numeric_limits<float>::quiet_NaN();
    const double y = scale.scaled(x);
    return scale.value(how_.rounding == Rounding::nearest ? grid_.nearest(y) : grid_.at_random(y, word()));
  }

  const Simulate& k_;
  const Simulation& how_;
  const ElementGrid grid_{how_.element};
  T* out_;
  int64_t rows_, columns_;
  const int32_t* rows_counted_ = k_.rows.defined() ? k_.rows.device_data<int32_t>() : nullptr;
  std::vector<uint32_t> keys_;  // keys of the amax of each block
  uint32_t tensor_amax_ = 0;
  ErrorSums sums_{};
};

}  // namespace

void CpuReference::execute(const Simulate& k) {
  with_dtypes(k, [&]<class X, class T>() {
    write_source<X, T>(k);
    Rounder<T>(k).run();
  });
}

}  // namespace mantissa
