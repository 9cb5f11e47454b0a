#include "backend/cpu/fast/gemm/few_rows_gemm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <type_traits>
#include <vector>

#include "backend/cpu/fast/gemm/gemm_tiles.h"
#include "backend/cpu/fast/gemm/weight_steps.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/scalar.h"
#include "base/parallel.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

using simd::Floats;
using steps::kSpan, steps::kSpans, steps::kStep, steps::kVectors;

constexpr int64_t kPieceBytes = int64_t{512} << 10;  // bytes of a weight: many against the first ones, which nothing fetches ahead

// Rows of a weight, as values or as codes, and what they are multiplied with.
template <class Scale>
struct Piece {
  const std::byte* weight;
  int64_t rows, row_bytes, depth;
  int64_t scales_across;             // scales of a row of blocks
  const std::byte* last;             // byte of the whole weight
  const Scale* scales;               // [blocks, scales_across]
  int64_t block_rows, row_of_block;  // row_of_block: that of the first row
  const float* x;                    // [x_rows, x_row], laid out as the steps
  int64_t x_rows, x_row;
  float* sums;  // [x_rows, rows, lanes], to be summed over lanes: summed here, g++ 12 takes the last step of a row apart lane by lane
};

// Returns whether a scale is extreme.
template <class Steps>
[[gnu::always_inline]] inline bool make_scales(const uint8_t* __restrict codes, int64_t count, typename Steps::Scale* __restrict scales) {
  uint32_t extreme = 0;
  for (int64_t i = 0; i < count; ++i) {
    scales[i] = Steps::scale(codes[i]);
    extreme |= Steps::extreme(codes[i]);
  }
  return extreme != 0;
}

// Asks for what is read a few rows later: by itself the CPU looks ahead too short a way. Nothing is asked for behind the weight, where a
// page that was never written would be looked for in vain each time.
[[gnu::always_inline]] inline void prefetch(const std::byte* from, const std::byte* last) {
  constexpr uintptr_t kAhead = 4096;
  __builtin_prefetch(
      reinterpret_cast<const void*>(std::min(reinterpret_cast<uintptr_t>(from) + kAhead, reinterpret_cast<uintptr_t>(last))));
}

template <class Part>
[[gnu::always_inline]] inline Part load_part(const float* from) {
  Part out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
template <class Part>
[[gnu::always_inline]] inline Part fma(Part a, Part b, Part c) {
  if constexpr (std::is_same_v<Part, Floats>) {
    return simd::fma(a, b, c);
  } else {
    return wide::fma(a, b, c);
  }
}
template <class Part, size_t kParts>
[[gnu::always_inline]] inline Floats joined(const Part (&parts)[kParts]) {
  if constexpr (kParts == 2) {
    return parts[0] + parts[1];
  } else {
    return __builtin_shufflevector(parts[0], parts[0], 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(parts[0], parts[0], 8, 9, 10, 11, 12, 13, 14, 15);
  }
}

// Multiplies one row of the weight with kRows rows of x. Returns false if an element is NaN.
template <class Steps, int kRows>
[[gnu::always_inline]] inline bool multiply_row(const Piece<typename Steps::Scale>& piece, const std::byte* weight,
                                                const typename Steps::Scale* scales, const float* x, float* out) {
  using Part = typename Steps::Part;
  constexpr int64_t kParts = sizeof(Part) == sizeof(Floats) ? 2 : 1;
  Part sums[size_t{kRows}][size_t{kParts}] = {};
  bool numbers = true;
  const auto step = [&]<bool kPlain>(const std::byte* from, int64_t s) __attribute__((always_inline)) {
    Part parts[size_t{kRows}][size_t{kParts}] = {};  // two vectors for each row, because each addition to one waits for the one before
    const float* at = x + s * kStep;
    for (int64_t line = 0; line < Steps::kBytes; line += 64) prefetch(from + line, piece.last);
    const auto take = [&](int64_t v, Part w) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        Part& part = parts[r][v % kParts];
        part = fma(w, load_part<Part>(at + r * piece.x_row + v * simd::kLanes), part);
      }
    };
    numbers &= Steps::template read<kPlain>(from, scales + kSpans * s, take);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int64_t p = 0; p < kParts; ++p) sums[r][p] = Steps::add(sums[r][p], parts[r][p], scales + kSpans * s);
  };
  const int64_t whole = piece.depth / kStep, left = piece.row_bytes - whole * Steps::kBytes;
  if constexpr (Steps::kPlainSteps == 0) {
    for (int64_t s = 0; s < whole; ++s) step.template operator()<true>(weight + s * Steps::kBytes, s);
  } else {
    for (int64_t s = 0; s < whole;) {
      const int64_t end = std::min(whole, s + Steps::kPlainSteps);
      const std::byte* from = weight + s * Steps::kBytes;
      // With a constant the loop within is unrolled.
      const bool plain = end - s == Steps::kPlainSteps ? Steps::plain(from, Steps::kPlainSteps) : Steps::plain(from, end - s);
      if (plain) [[likely]] {
        for (; s < end; ++s) step.template operator()<true>(weight + s * Steps::kBytes, s);
      } else {
        for (; s < end; ++s) step.template operator()<false>(weight + s * Steps::kBytes, s);
      }
    }
  }
  if (left > 0) {
    alignas(32) std::byte last[size_t{Steps::kBytes}] = {};
    std::memcpy(last, weight + whole * Steps::kBytes, static_cast<size_t>(left));
    step.template operator()<Steps::kPlainSteps == 0>(last, whole);
  }
  for (int r = 0; r < kRows; ++r) simd::store(out + r * piece.rows * simd::kLanes, joined(sums[r]));
  return numbers;
}

template <class Steps>
[[gnu::always_inline]] inline bool multiply_rows(const Piece<typename Steps::Scale>& piece) {
  bool numbers = true;
  const typename Steps::Scale* scales = piece.scales;
  int64_t row_of_block = piece.row_of_block;
  for (int64_t n = 0; n < piece.rows; ++n) {
    const std::byte* weight = piece.weight + n * piece.row_bytes;
    const float* x = piece.x;
    float* out = piece.sums + n * simd::kLanes;
    int64_t left = piece.x_rows;
    for (; left >= 4; left -= 4, x += 4 * piece.x_row, out += 4 * piece.rows * simd::kLanes)
      numbers &= multiply_row<Steps, 4>(piece, weight, scales, x, out);
    if (left >= 2) {
      numbers &= multiply_row<Steps, 2>(piece, weight, scales, x, out);
      left -= 2, x += 2 * piece.x_row, out += 2 * piece.rows * simd::kLanes;
    }
    if (left > 0) numbers &= multiply_row<Steps, 1>(piece, weight, scales, x, out);
    if (++row_of_block == piece.block_rows) row_of_block = 0, scales += piece.scales_across;
  }
  return numbers;
}

template <class Steps>
bool run(const Piece<typename Steps::Scale>& piece) {
  return cloned<multiply_rows<Steps>>(piece);
}
template <>
bool run<steps::E4M3Codes<>>(const Piece<uint32_t>& piece) {
  return cloned<multiply_rows<steps::E4M3Codes<false>>, multiply_rows<steps::E4M3Codes<false>>,
                multiply_rows<steps::E4M3Codes<kCpuLevels>>>(piece);
}
template <>
bool run<steps::E2M1Codes<>>(const Piece<float>& piece) {
  return cloned<multiply_rows<steps::E2M1Codes<kCpuLevels>>, multiply_rows<steps::E2M1Codes<false>>,
                multiply_rows<steps::E2M1Codes<kCpuLevels, kCpuLevels>>>(piece);
}

// Room that the calling thread keeps.
template <class T, int kUse>
T* room_for(int64_t count) {
  thread_local std::vector<T> room;
  if (room.size() < static_cast<size_t>(count)) room.resize(static_cast<size_t>(count));
  return room.data();
}

// Makes the scales of rows [first, first + rows) of codes: one for each span of each row of blocks, those of the last block as if it were
// whole, and one more, which multiplies what is read beside a row. Returns nullptr if a block that is not zero has an extreme scale; blocks
// of zeros, as in padding, have the scale 0, or the least of their range.
template <class Steps>
const typename Steps::Scale* scales_of(const QuantizedTensor& codes, int64_t first, int64_t rows) {
  using Scale = typename Steps::Scale;
  const int64_t height = codes.how.block_rows, each = codes.how.block_cols / kSpan, blocks = codes.scales.dim(1);
  const int64_t begin = first / height, count = (ceil_div(first + rows, height) - begin) * blocks;
  const uint8_t* stored = codes.scales.device_data<uint8_t>();
  Scale* const scales = room_for<Scale, 0>(count * each + 1);
  scales[count * each] = Steps::scale(127);
  const bool extreme = cloned<make_scales<Steps>>(stored + begin * blocks, count, scales);
  for (int64_t i = count - 1; each > 1 && i >= 0; --i) std::fill_n(scales + i * each, each, Scale{scales[i]});
  const int64_t row_bytes = codes.shape[1] * Steps::kBytes / kStep, spans = codes.shape[1] / kSpan;
  for (int64_t row = first; extreme && row < first + rows; ++row) {
    for (int64_t i = 0; i < spans; ++i) {
      if (Steps::extreme(stored[row / height * blocks + i / each]) == 0) continue;
      if (!Steps::zero(codes.codes.device_bytes() + row * row_bytes + i * Steps::kBytes / kSpans)) return nullptr;
    }
  }
  return scales;
}

// Lays a [M, K] out as the steps do, filled up with zeros. Returns false where an element is so large that a sum of a step could overflow
// although the scaled one does not.
template <class Steps, class T>
bool lay_out(const Tensor& a, float* to) {
  constexpr auto kColumns = [] {
    std::array<int64_t, static_cast<size_t>(kStep)> columns{};
    for (int64_t i = 0; i < kStep; ++i) columns[static_cast<size_t>(i)] = Steps::column(i / simd::kLanes, i % simd::kLanes);
    return columns;
  }();
  constexpr uint32_t kLarge = (127 + 119) << 23;
  const int64_t depth = a.dim(1);
  uint32_t largest = 0;
  for (int64_t r = 0; r < a.dim(0); ++r) {
    const T* row = a.device_data<T>() + r * depth;
    for (int64_t first = 0; first < depth; first += kStep, to += kStep) {
      for (size_t i = 0; i < kColumns.size(); ++i) {
        const int64_t column = first + kColumns[i];
        to[i] = column < depth ? lane::load(row[column]) : 0.0F;
        largest = std::max(largest, std::bit_cast<uint32_t>(to[i]) & ~kFp32Sign);
      }
    }
  }
  return !Steps::kScaled || largest < kLarge;
}

// Sums over lanes, adds the bias to columns [first, first + cols) of all rows, and rounds.
void finish(const FewRowsGemm& k, const float* sums, int64_t first, int64_t cols, float* bias) {
  load_bias(k.bias.defined() ? &k.bias : nullptr, first, cols, bias);
  for (int64_t r = 0; r < k.out.dim(0); ++r) {
    const auto add = [&]<class T>() {
      T* out = k.out.device_data<T>() + r * k.out.dim(1) + first;
      for (int64_t j = 0; j < cols; ++j, sums += simd::kLanes) out[j] = store<T>(simd::sum(simd::load(sums)) + bias[j]);
    };
    k.out.dtype() == Dtype::bf16 ? add.template operator()<bf16>() : add.template operator()<float>();
  }
}

const std::byte* elements(const Value& b) {
  const auto* codes = std::get_if<QuantizedTensor>(&b);
  return (codes ? codes->codes : std::get<Tensor>(b)).device_bytes();
}

// Multiplies with weights of one shape [N, K], cut into pieces of some rows of a weight, so that all threads get equally many pieces.
template <class Steps>
bool multiply(std::span<const FewRowsGemm> gemms) {
  const Shape shape = shape_of(gemms.front().b);
  const int64_t rows = shape[0], depth = shape[1], row_bytes = depth * Steps::kBytes / kStep, x_row = round_up(depth, kStep);
  int64_t x_rows = 0;
  for (const FewRowsGemm& k : gemms) x_rows += k.a.dim(0);
  float* to = room_for<float, 3>(x_rows * x_row);
  std::vector<const float*> x;
  bool laid_out = true;
  for (const FewRowsGemm& k : gemms) {
    x.push_back(to);
    laid_out &= k.a.dtype() == Dtype::bf16 ? lay_out<Steps, bf16>(k.a, to) : lay_out<Steps, float>(k.a, to);
    to += k.a.dim(0) * x_row;
  }
  if (!laid_out) return false;
  const int64_t threads = num_threads(), each = std::max<int64_t>(1, rows * row_bytes / (threads * kPieceBytes));
  const int64_t height = std::max<int64_t>(1, ceil_div(rows, threads * each)), pieces = ceil_div(rows, height);
  std::atomic<bool> exact = true;
  parallel_for(std::ssize(gemms) * pieces, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto index = static_cast<size_t>(i / pieces);
      const FewRowsGemm& k = gemms[index];
      const int64_t first = i % pieces * height, count = std::min(height, rows - first);
      Piece<typename Steps::Scale> piece{.weight = elements(k.b) + first * row_bytes,
                                         .rows = count,
                                         .row_bytes = row_bytes,
                                         .depth = depth,
                                         .scales_across = 0,
                                         .last = elements(k.b) + rows * row_bytes - 1,
                                         .scales = nullptr,
                                         .block_rows = 1,
                                         .row_of_block = 0,
                                         .x = x[index],
                                         .x_rows = k.a.dim(0),
                                         .x_row = x_row,
                                         .sums = room_for<float, 1>(k.a.dim(0) * count * simd::kLanes)};
      if constexpr (Steps::kScaled) {
        const auto& codes = std::get<QuantizedTensor>(k.b);
        piece.scales = scales_of<Steps>(codes, first, count);
        piece.block_rows = codes.how.block_rows, piece.row_of_block = first % codes.how.block_rows;
        piece.scales_across = codes.scales.dim(1) * (codes.how.block_cols / kSpan);
      }
      if ((Steps::kScaled && !piece.scales) || !run<Steps>(piece)) {
        exact = false;
      } else {
        finish(k, piece.sums, first, count, room_for<float, 2>(count));
      }
    }
  });
  return exact;
}

}  // namespace

bool takes_few_rows(const Value& b) {
  const auto* codes = std::get_if<QuantizedTensor>(&b);
  if (!codes) return std::get<Tensor>(b).dtype() != Dtype::f64;
  const bool has_steps = codes->how.format == Format::e4m3 || codes->how.format == Format::e2m1;
  return has_steps && codes->how.block_cols % kSpan == 0 && codes->shape[1] % kSpan == 0;
}

bool multiply_few_rows(std::span<const FewRowsGemm> gemms) {
  const Value& b = gemms.front().b;
  if (const auto* dense = std::get_if<Tensor>(&b)) {
    return dense->dtype() == Dtype::bf16 ? multiply<steps::Values<bf16>>(gemms) : multiply<steps::Values<float>>(gemms);
  }
  return std::get<QuantizedTensor>(b).how.format == Format::e4m3 ? multiply<steps::E4M3Codes<>>(gemms)
                                                                 : multiply<steps::E2M1Codes<>>(gemms);
}

}  // namespace mantissa
