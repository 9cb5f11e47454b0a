// RandomNormal with the bits of random_normal() (base/rng.h), in vectors.
//
// That function rounds a double, which the logarithm and the cosine of the C library make, to float. Here both come of polynomials, so that
// the double is another one by at most kError of the radius: a few times what rounding adds up to on both sides. As a rule all doubles that
// close round to the same float, which then is the draw; about four draws in a million are left to random_normal() itself.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numbers>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/rows/philox_lanes.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "base/parallel.h"
#include "mantissa/base/rng.h"

namespace mantissa {
namespace {

constexpr double kError = 1.5e-14;

// The parameters of a draw except its index.
struct Normals {
  RngKey key;
  uint32_t what;
  double std;
};

// Evaluates a polynomial. Coefficients follow from that of the highest power on.
[[gnu::always_inline]] inline double polynomial(double, double sum) { return sum; }
template <class... More>
[[gnu::always_inline]] inline double polynomial(double x, double sum, double next, More... more) {
  return polynomial(x, sum * x + next, more...);
}

// log((word + 1) / 2^32) = e log 2 + log m with m from sqrt(1/2) to sqrt(2), and log m = 2 artanh((m - 1) / (m + 1)).
[[gnu::always_inline]] inline double log_of(uint32_t word) {
  constexpr uint64_t kLeast = 0x3FE6A09E00000000U;  // the least m, as bits
  constexpr uint64_t kBias = 64;                    // keeps exponents above 0
  const auto bits = std::bit_cast<uint64_t>((static_cast<double>(word) + 1.0) * 0x1p-32);
  const uint64_t biased = (bits - kLeast + (kBias << 52)) >> 52;
  const auto m = std::bit_cast<double>(bits - ((biased - kBias) << 52));
  const double e = std::bit_cast<double>(biased | 0x4330000000000000U) - (0x1p52 + static_cast<double>(kBias));
  const double s = (m - 1.0) / (m + 1.0);
  return e * std::numbers::ln2 + s * polynomial(s * s, 2.0 / 17, 2.0 / 15, 2.0 / 13, 2.0 / 11, 2.0 / 9, 2.0 / 7, 2.0 / 5, 2.0 / 3, 2.0);
}

// cos(2 pi word / 2^32), from the nearest quarter of a turn, and the series of sine and cosine for the angle beyond it.
[[gnu::always_inline]] inline double cosine_of(uint32_t word) {
  const uint32_t quarter = (word + 0x20000000U) >> 30;
  const double angle = static_cast<double>(static_cast<int32_t>(word - (quarter << 30))) * (2.0 * std::numbers::pi * 0x1p-32);
  const double square = angle * angle;
  const double sine = angle * polynomial(square, -1.0 / 1307674368000.0, 1.0 / 6227020800.0, -1.0 / 39916800.0, 1.0 / 362880.0,
                                         -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0, 1.0);
  const double cosine = polynomial(square, 1.0 / 20922789888000.0, -1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0, 1.0 / 40320.0,
                                   -1.0 / 720.0, 1.0 / 24.0, -0.5, 1.0);
  const uint64_t odd = -uint64_t{quarter & 1U}, sign = uint64_t{(quarter + 1U) & 2U} << 62;
  return std::bit_cast<double>(((std::bit_cast<uint64_t>(sine) & odd) | (std::bit_cast<uint64_t>(cosine) & ~odd)) ^ sign);
}

// Draws kDrawsAtOnce of them.
[[gnu::always_inline]] inline void draw(const Normals& k, uint64_t index, float* __restrict out) {
  DrawnWords<2> words;
  draw_words(k.key, k.what, index, words);
  alignas(64) float least[kDrawsAtOnce];
  alignas(64) float most[kDrawsAtOnce];
  for (int64_t j = 0; j < kDrawsAtOnce; ++j) {
    const double radius = __builtin_sqrt(-2.0 * log_of(words.of[0][j])), x = radius * cosine_of(words.of[1][j]);
    least[j] = static_cast<float>(x - kError * radius);
    most[j] = static_cast<float>(x + kError * radius);
  }
  uint32_t undecided = 0;
  for (int64_t j = 0; j < kDrawsAtOnce; ++j) undecided |= least[j] != most[j] || least[j] == 0.0F ? 1U : 0U;  // the sign of 0 is, too
  if (undecided != 0) {
    for (int64_t j = 0; j < kDrawsAtOnce; ++j) {
      if (least[j] != most[j] || least[j] == 0.0F) least[j] = random_normal(k.key, k.what, index + static_cast<uint64_t>(j));
    }
  }
  for (int64_t j = 0; j < kDrawsAtOnce; ++j) out[j] = static_cast<float>(k.std * static_cast<double>(least[j]));
}

[[gnu::always_inline]] inline void draw_range(Normals k, uint64_t index, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kDrawsAtOnce <= n; i += kDrawsAtOnce) draw(k, index + static_cast<uint64_t>(i), out + i);
  if (i == n) return;
  alignas(64) float last[kDrawsAtOnce];
  draw(k, index + static_cast<uint64_t>(i), last);
  std::memcpy(out + i, last, static_cast<size_t>(n - i) * sizeof(float));
}

}  // namespace

void CpuBackend::execute(const RandomNormal& k) {
  if (k.out.dtype() != Dtype::f32) return CpuReference::execute(k);
  const bool whole_rows = k.row_stride == 0 || k.out.shape().rank() == 0 || k.row_stride == k.out.shape()[-1];
  const int64_t columns = whole_rows ? k.out.elements() : k.out.shape()[-1];
  float* out = k.out.device_data<float>();
  parallel_for(k.out.elements(), kPieceElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t row = i / columns, next = std::min(end, (row + 1) * columns);
      const int64_t index = k.first_index + row * (whole_rows ? 0 : k.row_stride) + i % columns;
      cloned<draw_range>({.key = k.key, .what = k.what, .std = k.std}, static_cast<uint64_t>(index), out + i, next - i);
      i = next;
    }
  });
}

}  // namespace mantissa
