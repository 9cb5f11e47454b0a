// NVFP4 in sixteen lanes, a block at a time: its values and the midpoints between them are numbers of bf16, so tables of them by scale code
// replace the arithmetic of formats/nvfp4.h.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "backend/cpu/fast/codes/code_lanes.h"
#include "mantissa/backend/backend.h"
#include "mantissa/formats/nvfp4.h"

namespace mantissa::lanes {

static_assert(kNvfp4Block == kLanes);

// By scale code, for a tensor's scale of 1: bf16 bits of all 16 values, and for each pair of neighboring elements the largest magnitude
// that rounds to the lower one. Arrays of C: clones of kernels may call no checks.
struct Nvfp4Tables {
  int16_t values[128][kLanes] = {}, midpoints[128][7] = {};  // NOLINT

  Nvfp4Tables() {
    constexpr int kQuarters[] = {1, 3, 5, 7, 10, 14, 20};  // NOLINT
    for (int scale = 0; scale < 128; ++scale) {
      const auto at = [scale](int code) { return Nvfp4::decode(static_cast<uint8_t>(code), static_cast<uint8_t>(scale), 0); };
      for (int code = 0; code < kLanes; ++code) values[scale][code] = static_cast<int16_t>(at(code) >> 16);
      const float whole = __builtin_bit_cast(float, at(2));
      for (int i = 0; i < 7; ++i) {
        const float midpoint = 0.25F * static_cast<float>(kQuarters[i]) * whole;
        midpoints[scale][i] = static_cast<int16_t>(static_cast<int>(__builtin_bit_cast(uint32_t, midpoint) >> 16) - i % 2);
      }
    }
  }
  static const Nvfp4Tables& get() {
    static const Nvfp4Tables tables;
    return tables;
  }
};

// Multiplies bf16 bits of numbers, none of which leaves the normal ones, by 2^exponent when it is added.
[[gnu::always_inline]] inline int16_t exponent_step(int8_t exponent) { return static_cast<int16_t>(exponent * 128); }

// Codes without signs of magnitudes in a block of this scale.
[[gnu::always_inline]] inline Words encode_nvfp4(Words m, const int16_t* midpoints, int16_t step) {
  Words code{};
#pragma GCC unroll 7
  for (int i = 0; i < 7; ++i) code -= m > broadcast(midpoints[i] + step);
  return code;
}

using Integers = int32_t __attribute__((vector_size(32)));
// Magnitudes of bf16 in units of which `inverse` is the inverse, cut off, eight in each half.
struct InUnits {
  Integers low, high;

  [[gnu::always_inline]] InUnits(Words m, float inverse) {
    const auto halves = std::bit_cast<std::array<detail::HalfUnsigned, 2>>(m);
    low = of(std::get<0>(halves), inverse);
    high = of(std::get<1>(halves), inverse);
  }

 private:
  [[gnu::always_inline]] static Integers of(detail::HalfUnsigned half, float inverse) {
    return __builtin_convertvector(reinterpret_cast<Floats>(__builtin_convertvector(half, detail::Integers) << 16) * inverse, Integers);
  }
};

// Nvfp4::searched_scale() of a block with these magnitudes. Sums of squares are whole numbers that fp64 holds.
[[gnu::always_inline]] inline uint8_t search_nvfp4(Words m, uint32_t amax, int8_t exponent, const Nvfp4Tables& tables) {
  using Doubles = double __attribute__((vector_size(64)));
  if (amax >= kFp32Inf) return Nvfp4::nan_scale;
  const Nvfp4::Candidates candidates = Nvfp4::candidates(amax, exponent);
  uint8_t best = candidates.first;
  if (best == candidates.last) return best;
  const int16_t step = exponent_step(exponent);
  const uint32_t unit = (amax >> 23) - Nvfp4::kErrorDigits;  // from 39 on: for less there is one candidate
  const auto inverse = __builtin_bit_cast(float, (254U - unit) << 23);
  // Subnormal numbers have no unit, and must not reach arithmetic, which flushes them on some CPUs and takes long on others.
  const InUnits x(m & (m >= 0x0080), inverse);
  double least = 0x1p60;
  for (int scale = candidates.first; scale <= candidates.last; ++scale) {
    const Words table = load(tables.values[scale]);
    const Words values =
        looked_up(wrapped_sum(table, broadcast(step) & (magnitude(table) != 0)), encode_nvfp4(m, tables.midpoints[scale], step));
    const InUnits y(values, inverse);
    const Doubles low = __builtin_convertvector(x.low - y.low, Doubles), high = __builtin_convertvector(x.high - y.high, Doubles);
    const Doubles squares = low * low + high * high;
    double sum = 0.0;
    for (int i = 0; i < 8; ++i) sum += squares[i];
    if (sum < least) least = sum, best = static_cast<uint8_t>(scale);
  }
  return best;
}

// Quantizes rows [begin, end) of the codes, those beyond x as zeros. Returns true if a value was not finite.
[[gnu::always_inline]] inline bool quantize_nvfp4(const Quantize& k, const Nvfp4Tables& tables, int64_t begin, int64_t end) {
  const int8_t exponent = k.out.how.tensor_exponent;
  const int64_t cols = k.x.dim(1), given = std::min(end, k.x.dim(0));
  const int16_t step = exponent_step(exponent);
  bool nonfinite = false;
  for (int64_t r = begin; r < end; ++r) {
    uint8_t* codes = k.out.codes.device_data<uint8_t>() + r * cols / 2;
    uint8_t* scales = k.out.scales.device_data<uint8_t>() + r * cols / kLanes;
    if (r >= given) {
      std::memset(codes, 0, static_cast<size_t>(cols / 2));
      std::memset(scales, Nvfp4::least_scale, static_cast<size_t>(cols / kLanes));
      continue;
    }
    const bf16* x = k.x.device_data<bf16>() + r * cols;
    for (int64_t c = 0; c < cols; c += kLanes, codes += kLanes / 2) {
      const Words bits = load(x + c), m = magnitude(bits);
      const auto amax = static_cast<uint32_t>(largest(m));
      const uint8_t scale =
          k.out.how.rule == ScaleRule::mse ? search_nvfp4(m, amax << 16, exponent, tables) : Nvfp4::scale(amax << 16, exponent);
      *scales++ = scale;
      Words code{};
      if (scale != Nvfp4::nan_scale) [[likely]] {
        code = encode_nvfp4(m, tables.midpoints[scale], step);
        code |= reinterpret_cast<Words>(reinterpret_cast<Unsigned>(bits) >> 12) & static_cast<int16_t>(E2M1::sign_bit);
      } else {
        nonfinite = true;
      }
      store_codes<E2M1>(codes, code);
    }
  }
  return nonfinite;
}

// Dequantizes rows [begin, end). Nvfp4 has no extreme scales.
template <class T>
[[gnu::always_inline]] inline void dequantize_nvfp4(const Dequantize& k, const Nvfp4Tables& tables, int64_t begin, int64_t end) {
  const int64_t cols = k.x.shape[1], width = k.out.dim(1);
  const Words step = broadcast(exponent_step(k.x.how.tensor_exponent));
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* codes = k.x.codes.device_data<uint8_t>() + (r * cols + k.first_col) / 2;
    const uint8_t* scales = k.x.scales.device_data<uint8_t>() + (r * cols + k.first_col) / kLanes;
    T* out = k.out.device_data<T>() + r * width;
    for (int64_t c = 0; c < width; c += kLanes, codes += kLanes / 2) {
      const uint8_t scale = *scales++;
      const Words table = load(tables.values[scale & E4M3::magnitude_mask]);
      const Words magnitudes = magnitude(table);
      Words values = wrapped_sum(table, step & ((magnitudes != 0) & (magnitudes < 0x7F80)));
      if (scale >= E4M3::sign_bit) values ^= broadcast(0x8000) & (magnitudes < 0x7F80);
      store(out + c, looked_up(values, load_codes<E2M1, kLanes>(codes)[0]));
    }
  }
}

}  // namespace mantissa::lanes
