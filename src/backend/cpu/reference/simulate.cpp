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

// Rounds `out` in place, by row blocks; in order where the error is wanted.
template <class T>
void round(const Simulate& k) {
  const Simulation& how = k.how;
  const int64_t rows = k.out.dim(0), columns = k.out.dim(1);
  const int64_t row_blocks = ceil_div(rows, how.block_rows), across = ceil_div(columns, how.block_cols);
  T* out = k.out.device_data<T>();
  const auto block = [&](int64_t row_block, int64_t i) {
    const int64_t row = row_block * how.block_rows, column = i * how.block_cols;
    return Block{row, std::min(how.block_rows, rows - row), column, std::min(how.block_cols, columns - column)};
  };
  std::vector<uint32_t> keys(static_cast<size_t>(row_blocks * across));  // keys of the amax of each block
  const auto key = [&](int64_t row_block, int64_t i) -> uint32_t& { return keys[static_cast<size_t>(row_block * across + i)]; };
  parallel_for(row_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row_block = begin; row_block < end; ++row_block) {
      for (int64_t i = 0; i < across; ++i) {
        uint32_t& most = key(row_block, i);
        for_each_element(block(row_block, i),
                         [&](int64_t r, int64_t c) { most = std::max(most, amax_key(fp32_bits(out[r * columns + c]), how.rule)); });
      }
    }
  });
  uint32_t tensor_amax = 0;
  for (const uint32_t each : keys) tensor_amax = std::max(tensor_amax, amax_of_key(each));
  const ElementGrid grid(how.element);
  const int32_t* counted = k.rows.defined() ? k.rows.device_data<int32_t>() : nullptr;
  ErrorSums sums{};
  const auto round_blocks = [&](int64_t begin, int64_t end) {
    ElementWords words(k.draws);
    for (int64_t item = begin * across; item < end * across; ++item) {
      const int64_t row_block = item / across, i = item % across;
      const auto scale = SimulatedBlock::make(amax_of_key(key(row_block, i)), tensor_amax, how, static_cast<float>(grid.largest()));
      bool any = false;
      for_each_element(block(row_block, i), [&](int64_t r, int64_t c) {
        T& element = out[r * columns + c];
        const float x = widened(element);
        const double y = scale.scaled(x);
        float value = std::numeric_limits<float>::quiet_NaN();
        if (!scale.poisoned()) value = scale.value(how.rounding == Rounding::nearest ? grid.nearest(y) : grid.at_random(y, words(r, c)));
        element = narrowed<T>(value);
        if (!k.error.defined() || (counted && counted[r] < 0)) return;
        add_error(sums, x, widened(element), std::fabs(y) > grid.largest());
        any = true;
      });
      if (any) sums[QuantizationError::scales + scale.exponent()] += 1.0;
    }
  };
  if (!k.error.defined()) return parallel_for(row_blocks, 1, round_blocks);
  round_blocks(0, row_blocks);
  std::ranges::copy(sums, k.error.device_data<double>());
}

}  // namespace

void CpuReference::execute(const Simulate& k) {
  with_dtypes(k, [&]<class X, class T>() {
    write_source<X, T>(k);
    round<T>(k);
  });
}

}  // namespace mantissa
