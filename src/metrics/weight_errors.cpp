#include "metrics/weight_errors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "base/parallel.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/bf16.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/with_element.h"
#include "ops/quantization_observer.h"

namespace mantissa {
namespace {

// Rows of a matrix on the host, with the values and the scales of their codes; they begin and end with whole blocks, but for the last ones.
struct BlockRows {
  const bf16* x;
  const float* values;
  const uint8_t* scales;
  int64_t rows, columns;
  const Quantization& how;
  const std::array<float, 256>& largest;  // the largest value of a code, by scale
};

struct BlockErrors {
  ErrorParts parts;
  double ratio = 0.0;  // noise to signal of the worst block, which begins at row and column; 0: none has an error
  int64_t row = 0, column = 0;

  void add(const BlockErrors& next) {
    parts.add(next.parts);
    if (next.ratio > ratio) ratio = next.ratio, row = next.row, column = next.column;
  }
};

std::array<float, 256> largest_values(const Quantization& how) {
  std::array<float, 256> out{};
  with_any_element(how.format, [&]<class E>() {
    for (size_t scale = 0; scale < out.size(); ++scale) {
      const auto code = static_cast<uint8_t>(E::max_code);
      out[scale] = __builtin_bit_cast(float, decode_in_block<E>(code, static_cast<uint8_t>(scale), how.code_rule()));
    }
  });
  return out;
}

// Sums over the rows of blocks [begin, end), in the order of rows and columns.
BlockErrors errors_of(const BlockRows& all, int64_t begin, int64_t end) {
  const int64_t height = all.how.block_rows, width = all.how.block_cols, across = ceil_div(all.columns, width);
  BlockErrors out;
  for (int64_t of = begin; of < end; ++of) {
    for (int64_t i = 0; i < across; ++i) {
      const float largest = all.largest[all.scales[of * across + i]];
      double signal = 0.0, noise = 0.0;
      for (int64_t row = of * height; row < std::min((of + 1) * height, all.rows); ++row) {
        for (int64_t column = i * width; column < std::min((i + 1) * width, all.columns); ++column) {
          const float x = to_float(all.x[row * all.columns + column]), value = all.values[row * all.columns + column];
          const double error = double{x} - double{value}, squared = error * error;
          signal += double{x} * double{x};
          noise += squared;
          (value == 0.0F ? out.parts.dead_zone : std::fabs(x) > largest ? out.parts.scale : out.parts.grid) += squared;
        }
      }
      const double ratio = noise > 0.0 ? noise / signal : 0.0;
      if (ratio > out.ratio) out.ratio = ratio, out.row = of * height, out.column = i * width;
    }
  }
  return out;
}

}  // namespace

std::vector<double> with_exponents(std::span<const double> parts, const Quantization& how) {
  std::vector<double> out(parts.begin(), parts.end());
  const auto scales = std::span(out).subspan(QuantizationError::scales);
  std::ranges::fill(scales, 0.0);
  for (size_t code = 0; code < scales.size(); ++code) {
    const double blocks = parts[QuantizationError::scales + code];
    const uint32_t one = Nvfp4::decode(2, static_cast<uint8_t>(code), how.tensor_exponent) & ~kFp32Sign;  // the element 1
    scales[one >> 23] += blocks;                                                                          // that of NaN is 255
  }
  return out;
}

void WeightErrors::add_measured(const Tensor& measured) {
  const std::vector<double> parts = to_host<double>(measured);
  sums_.add(parts);
  if (matrices_ > 1) {
    const std::optional<double> db = decibels(parts[QuantizationError::signal], parts[QuantizationError::noise]);
    if (db && (!worst_expert_ || *db < worst_expert_->sqnr_db)) worst_expert_ = WorstExpert{.expert = matrix_, .sqnr_db = *db};
  }
  ++matrix_;
}

void WeightErrors::add(const Tensor& rounded, const QuantizedTensor& codes) {
  const Tensor measured = empty(rounded.device(), Dtype::f64, {QuantizationError::size});
  rounded.device().run(QuantizationError{.x = rounded, .q = codes, .out = measured});
  add_measured(measured);
  add_blocks(rounded, codes);
  bytes_ += codes.bytes();
  rows_ += rounded.dim(0);
}

void WeightErrors::add(const Tensor& rounded, const Simulation& how) {
  const int64_t rows = rounded.dim(0), columns = rounded.dim(1);
  Simulate kernel{.x = rounded, .out = empty(rounded.device(), Dtype::f32, rounded.shape()), .how = how};
  kernel.how.rounding = Rounding::nearest;
  kernel.error = empty(rounded.device(), Dtype::f64, {QuantizationError::size});
  rounded.device().run(kernel);
  add_measured(kernel.error);
  const int64_t bits = 1 + how.element.exponent_bits + how.element.mantissa_bits;
  bytes_ += ceil_div(rows * columns * bits, 8) + ceil_div(rows, how.block_rows) * ceil_div(columns, how.block_cols);
  rows_ += rows;
}

// Decodes some megabytes at a time.
void WeightErrors::add_blocks(const Tensor& rounded, const QuantizedTensor& codes) {
  constexpr int64_t kElements = int64_t{4} << 20, kRowsOfPiece = 64;
  const Quantization& how = codes.how;
  const int64_t rows = rounded.dim(0), columns = rounded.dim(1), height = how.block_rows;
  const int64_t step = round_up(std::max<int64_t>(1, kElements / columns), std::max(height, kRowsOfPiece));
  const std::array<float, 256> largest = largest_values(how);
  BlockErrors all;
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(rows, begin + step);
    const QuantizedTensor part = slice(codes, begin, std::min(codes.dim(0), begin + step));
    const Tensor read = decoded(part, Dtype::f32);
    const HostBytes x(rounded.slice(begin, end)), values(read), scales(part.scales);
    const BlockRows blocks{.x = reinterpret_cast<const bf16*>(x.get().data()),
                           .values = reinterpret_cast<const float*>(values.get().data()),
                           .scales = reinterpret_cast<const uint8_t*>(scales.get().data()),
                           .rows = end - begin,
                           .columns = columns,
                           .how = how,
                           .largest = largest};
    const int64_t row_blocks = ceil_div(end - begin, height), chunk = std::max<int64_t>(1, kRowsOfPiece / height);
    std::vector<BlockErrors> pieces(static_cast<size_t>(ceil_div(row_blocks, chunk)));
    parallel_for(row_blocks, chunk,
                 [&](int64_t first, int64_t last) { pieces[static_cast<size_t>(first / chunk)] = errors_of(blocks, first, last); });
    for (BlockErrors& piece : pieces) {
      piece.row += begin;
      all.add(piece);
    }
  }
  if (!parts_) parts_.emplace();
  parts_->add(all.parts);
  if (all.ratio <= worst_ratio_) return;
  worst_ratio_ = all.ratio;
  worst_block_ = WorstBlock{.sqnr_db = -10.0 * std::log10(all.ratio), .row = rows_ + all.row, .column = all.column};
}

WeightError WeightErrors::result() const {
  WeightError out{.signal = sums_.part(QuantizationError::signal),
                  .noise = sums_.part(QuantizationError::noise),
                  .elements = static_cast<int64_t>(sums_.part(QuantizationError::elements)),
                  .bytes = bytes_,
                  .parts = parts_,
                  .worst_block = worst_block_};
  out.figures.role = role_name(OperandRole::weight);
  sums_.write(out.figures);
  out.figures.worst_expert = worst_expert_;
  return out;
}

}  // namespace mantissa
