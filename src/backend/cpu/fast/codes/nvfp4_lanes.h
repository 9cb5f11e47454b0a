// NVFP4 in sixteen lanes, a block at a time: its values and the midpoints between them are numbers of bf16, so tables of them by scale code
// replace the arithmetic of formats/nvfp4.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "backend/cpu/fast/codes/code_lanes.h"
#include "mantissa/backend/backend.h"
#include "mantissa/formats/nvfp4.h"

namespace mantissa::lanes {

static_assert(kNvfp4Block == kLanes);

// By scale code, for a tensor's scale of 1: bf16 bits of all 16 values, and for each pair of neighboring elements the largest magnitude
// that rounds to the lower one.
struct Nvfp4Tables {
  std::array<std::array<int16_t, kLanes>, 128> values{};
  std::array<std::array<int16_t, 8>, 128> midpoints{};

  Nvfp4Tables() {
    constexpr std::array kQuarters{1, 3, 5, 7, 10, 14, 20};
    for (size_t scale = 0; scale < values.size(); ++scale) {
      const auto at = [scale](uint8_t code) { return Nvfp4::decode(code, static_cast<uint8_t>(scale), 0); };
      for (size_t code = 0; code < kLanes; ++code) values[scale][code] = static_cast<int16_t>(at(static_cast<uint8_t>(code)) >> 16);
      const float whole = __builtin_bit_cast(float, at(2));
      for (size_t i = 0; i < kQuarters.size(); ++i) {
        const float midpoint = 0.25F * static_cast<float>(kQuarters[i]) * whole;
        midpoints[scale][i] = static_cast<int16_t>((__builtin_bit_cast(uint32_t, midpoint) >> 16) - i % 2);
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
[[gnu::always_inline]] inline Words encode_nvfp4(Words m, const std::array<int16_t, 8>& midpoints, int16_t step) {
  Words code{};
#pragma GCC unroll 7
  for (size_t i = 0; i < 7; ++i) code -= m > broadcast(midpoints[i] + step);
  return code;
}

using Integers = int32_t __attribute__((vector_size(32)));
// Magnitudes of bf16 in units of which `inverse` is the inverse, cut off, eight in each half.
[[gnu::always_inline]] inline std::array<Integers, 2> in_units(Words m, float inverse) {
  const auto halves = std::bit_cast<std::array<detail::HalfUnsigned, 2>>(m);
  const auto units = [inverse](detail::HalfUnsigned half) __attribute__((always_inline)) {
    return __builtin_convertvector(reinterpret_cast<Floats>(__builtin_convertvector(half, detail::Integers) << 16) * inverse, Integers);
  };
  return {units(halves[0]), units(halves[1])};
}

// Nvfp4::searched_scale() of a block with these magnitudes. Sums of squares are whole numbers that fp64 holds.
[[gnu::always_inline]] inline uint8_t search_nvfp4(Words m, uint32_t amax, int8_t exponent, const Nvfp4Tables& tables) {
  using Doubles = double __attribute__((vector_size(64)));
  const int16_t step = exponent_step(exponent);
  const uint32_t unit = (amax >> 23) - Nvfp4::kErrorDigits;  // not below 39: Nvfp4::candidates() names one scale for less
  const auto inverse = __builtin_bit_cast(float, (254U - unit) << 23);
  const std::array<Integers, 2> x = in_units(m, inverse);
  return Nvfp4::searched_scale(
      amax, exponent, [&](uint8_t scale) __attribute__((always_inline)) {
        const Words table = load(tables.values[scale].data());
        const Words values =
            looked_up(wrapped_sum(table, broadcast(step) & (magnitude(table) != 0)), encode_nvfp4(m, tables.midpoints[scale], step));
        const std::array<Integers, 2> y = in_units(values, inverse);
        const Doubles low = __builtin_convertvector(x[0] - y[0], Doubles), high = __builtin_convertvector(x[1] - y[1], Doubles);
        const Doubles squares = low * low + high * high;
        double sum = 0.0;
        for (int i = 0; i < 8; ++i) sum += squares[i];
        return static_cast<int64_t>(sum);
      });
}

// Quantizes rows [begin, end) of the codes, those beyond x as zeros. Returns true if a value was not finite.
[[gnu::always_inline]] inline bool quantize_nvfp4(const Quantize& k, int64_t begin, int64_t end) {
  const Nvfp4Tables& tables = Nvfp4Tables::get();
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
[[gnu::always_inline]] inline void dequantize_nvfp4(const Dequantize& k, int64_t begin, int64_t end) {
  const Nvfp4Tables& tables = Nvfp4Tables::get();
  const int64_t cols = k.x.shape[1], width = k.out.dim(1);
  const Words step = broadcast(exponent_step(k.x.how.tensor_exponent));
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* codes = k.x.codes.device_data<uint8_t>() + (r * cols + k.first_col) / 2;
    const uint8_t* scales = k.x.scales.device_data<uint8_t>() + (r * cols + k.first_col) / kLanes;
    T* out = k.out.device_data<T>() + r * width;
    for (int64_t c = 0; c < width; c += kLanes, codes += kLanes / 2) {
      const uint8_t scale = *scales++;
      const Words table = load(tables.values[scale & E4M3::magnitude_mask].data());
      const Words magnitudes = magnitude(table);
      Words values = wrapped_sum(table, step & ((magnitudes != 0) & (magnitudes < 0x7F80)));
      if (scale >= E4M3::sign_bit) values ^= broadcast(0x8000) & (magnitudes < 0x7F80);
      store(out + c, looked_up(values, load_codes<E2M1, kLanes>(codes)[0]));
    }
  }
}

}  // namespace mantissa::lanes
