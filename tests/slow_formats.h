// The number formats a second time, from their definition: tables of values in double, search, ldexp. Slow, and shares no code with
// formats/, so that the two can be held against each other and golden vectors made.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "mantissa/formats/format.h"

namespace mantissa::test {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

// Rules of the largest magnitude of a block, but flashinfer, which is for one format.
inline constexpr std::array kUsualRules{ScaleRule::rceil, ScaleRule::floor, ScaleRule::even, ScaleRule::ceil};
// Rules that look at all elements of a block beside those that look at its largest alone.
inline constexpr std::array kBlockRules{ScaleRule::rceil, ScaleRule::floor, ScaleRule::even, ScaleRule::ceil, ScaleRule::mse};
inline constexpr std::array kAllRules{ScaleRule::rceil, ScaleRule::floor, ScaleRule::even, ScaleRule::ceil, ScaleRule::flashinfer};

struct SlowFormat {
  Format format;
  std::vector<double> magnitudes;  // magnitudes of the finite codes, in order
  double power;                    // the largest power of two among them
  uint8_t minus_zero, nan, poison;
  int inf;                           // its code, or -1
  std::vector<double> tops, powers;  // largest element and largest power at each scale code 0..254

  double max() const { return magnitudes.back(); }
  bool packed() const { return minus_zero == 8; }
  int mantissa_bits() const { return packed() ? 1 : inf < 0 ? 3 : 2; }
};

inline SlowFormat slow_format(Format format) {
  SlowFormat out{
      .format = format, .magnitudes = {}, .power = 4, .minus_zero = 0x80, .nan = 0x7F, .poison = 0x7F, .inf = -1, .tops = {}, .powers = {}};
  if (format == Format::e4m3) {
    for (int code = 0; code <= 0x7E; ++code)
      out.magnitudes.push_back(code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10));
    out.power = 256;
  } else if (format == Format::e5m2) {
    for (int code = 0; code <= 0x7B; ++code)
      out.magnitudes.push_back(code < 4 ? std::ldexp(code, -16) : std::ldexp(4 + code % 4, code / 4 - 17));
    out.power = 32768;
    out.inf = 0x7C;
  } else {
    out.magnitudes = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    out.minus_zero = 8, out.nan = 7, out.poison = 0;
  }
  for (int scale = 0; scale < 255; ++scale) {
    out.tops.push_back(std::ldexp(out.max(), scale - 127));
    out.powers.push_back(std::ldexp(out.power, scale - 127));
  }
  return out;
}

// The magnitudes of eXmY in order, of which e4m3 and e5m2 lack the codes of NaN and Inf.
inline std::vector<double> free_magnitudes(int exponent_bits, int mantissa_bits) {
  const int all = 1 << (exponent_bits + mantissa_bits), bias = (1 << (exponent_bits - 1)) - 1;
  const int reserved = exponent_bits == 4 && mantissa_bits == 3 ? 1 : exponent_bits == 5 && mantissa_bits == 2 ? 4 : 0;
  std::vector<double> out;
  for (int code = 0; code < all - reserved; ++code) {
    const int field = code >> mantissa_bits, fraction = code & ((1 << mantissa_bits) - 1);
    const int significand = field == 0 ? fraction : (1 << mantissa_bits) + fraction;
    out.push_back(std::ldexp(significand, std::max(field, 1) - bias - mantissa_bits));
  }
  return out;
}

inline const SlowFormat& slow(Format format) {
  static const SlowFormat formats[] = {slow_format(Format::e4m3), slow_format(Format::e5m2), slow_format(Format::e2m1)};
  return formats[static_cast<int>(format) - 1];
}

inline double value_of_bits(uint32_t bits) { return static_cast<double>(std::bit_cast<float>(bits)); }

// The element nearest to y; of two equally near the one with the even code.
inline uint8_t slow_nearest(const SlowFormat& format, double y) {
  if (std::isnan(y)) return format.nan;
  const uint8_t sign = std::signbit(y) ? format.minus_zero : uint8_t{0};
  const double magnitude = std::abs(y);
  const auto above = std::lower_bound(format.magnitudes.begin(), format.magnitudes.end(), magnitude);
  auto code = static_cast<size_t>(above - format.magnitudes.begin());
  if (above == format.magnitudes.end()) {
    code -= 1;
  } else if (code > 0) {
    const double up = *above - magnitude, down = magnitude - *(above - 1);
    if (down < up || (down == up && code % 2 == 1)) code -= 1;
  }
  return static_cast<uint8_t>(sign | code);
}

// amax: NaN if there is no element it could be taken of.
inline uint8_t slow_scale(const SlowFormat& format, double amax, ScaleRule rule) {
  if (std::isnan(amax)) return 255;
  if (std::isinf(amax)) return rule == ScaleRule::flashinfer ? 254 : 255;
  if (rule == ScaleRule::flashinfer && amax < std::ldexp(format.max(), -126)) return 0;
  if (rule == ScaleRule::floor) {
    const auto fitting = std::upper_bound(format.powers.begin(), format.powers.end(), amax) - format.powers.begin();
    return static_cast<uint8_t>(std::max<int64_t>(fitting - 1, 0));
  }
  if (rule == ScaleRule::ceil)
    return static_cast<uint8_t>(std::lower_bound(format.powers.begin(), format.powers.end(), amax) - format.powers.begin());
  if (rule == ScaleRule::even) {  // rounded to the mantissa of an element amax may become the next power
    const double to_next = 2 - std::ldexp(1.0, -format.mantissa_bits() - 1);
    const auto below = [&](double power, double x) { return power * to_next / 2 <= x; };
    int64_t scale = std::upper_bound(format.powers.begin(), format.powers.end(), amax) - format.powers.begin() - 1;
    if (scale + 1 < std::ssize(format.powers) && below(format.powers[static_cast<size_t>(scale + 1)], amax)) ++scale;
    return static_cast<uint8_t>(std::max<int64_t>(scale, 0));
  }
  return static_cast<uint8_t>(std::lower_bound(format.tops.begin(), format.tops.end(), amax) - format.tops.begin());
}

__extension__ using WideInteger = __int128;

// The scale under mse of a block of finite numbers: tries floor's exponent and its neighbors. Squared errors are compared as exact
// integers: their differences from those at floor's exponent are multiples of 2^-60 if that exponent is 0.
inline uint8_t slow_searched_scale(const SlowFormat& format, const std::vector<double>& block) {
  double amax = 0;
  for (const double x : block) amax = std::max(amax, std::abs(x));
  if (amax == 0) return 0;
  const int floor = std::ilogb(amax) - std::ilogb(format.power);
  const auto rounded = [&](double x, int exponent) {
    return std::ldexp(format.magnitudes[slow_nearest(format, std::ldexp(x, -exponent))], exponent);
  };
  int best = 0;
  WideInteger least = 0;
  for (const int exponent : {-1, 0, 1}) {
    WideInteger error = 0;
    for (const double element : block) {
      const double x = std::ldexp(std::abs(element), -floor), at_floor = rounded(x, 0), here = rounded(x, exponent);
      error +=
          static_cast<WideInteger>(static_cast<long double>(here - at_floor) * static_cast<long double>(here + at_floor - 2 * x) * 0x1p60L);
    }
    if (exponent == -1 || error < least) best = exponent, least = error;
  }
  return static_cast<uint8_t>(std::clamp(floor + 127 + best, 0, 254));
}

// The code of x in a block of this scale.
inline uint8_t slow_code(const SlowFormat& format, double x, uint8_t scale, ScaleRule rule) {
  if (rule != ScaleRule::flashinfer) return scale == 255 ? format.poison : slow_nearest(format, std::ldexp(x, 127 - scale));
  if (!std::isfinite(x) || scale == 255) return format.nan;
  if (scale == 254 || scale == 0 || std::abs(x) < 0x1p-126) return std::signbit(x) ? format.minus_zero : uint8_t{0};
  return slow_nearest(format, std::ldexp(x, 127 - scale));
}

// element * 2^(scale - 127), not rounded.
inline double slow_value(const SlowFormat& format, uint8_t code, uint8_t scale, ScaleRule rule = ScaleRule::rceil) {
  const size_t magnitude = code & (format.minus_zero - 1U);
  const double sign = code & format.minus_zero ? -1.0 : 1.0;
  if (scale == 255) return kNan;
  if (magnitude < format.magnitudes.size()) {
    return magnitude == 0 && rule == ScaleRule::flashinfer ? 0.0 : sign * std::ldexp(format.magnitudes[magnitude], scale - 127);
  }
  return static_cast<int>(magnitude) == format.inf ? sign * kInf : kNan;
}

inline uint32_t fp32_bits(double value) { return std::bit_cast<uint32_t>(static_cast<float>(value)); }

// The bf16 nearest to a value, of two equally near the one with the even code; NaN as 0x7FC0.
inline uint16_t slow_bf16(double value) {
  static const std::vector<double> magnitudes = [] {
    std::vector<double> out;
    for (uint32_t code = 0; code < 0x7F80; ++code) out.push_back(value_of_bits(code << 16));
    out.push_back(0x1p128);  // where infinity begins, as the next on the grid
    return out;
  }();
  if (std::isnan(value)) return 0x7FC0;
  const uint32_t sign = std::signbit(value) ? 0x8000U : 0U;
  const double magnitude = std::min(std::abs(value), 0x1p128);
  auto code = static_cast<uint32_t>(std::lower_bound(magnitudes.begin(), magnitudes.end(), magnitude) - magnitudes.begin());
  if (code > 0) {
    const double up = magnitudes[code] - magnitude, down = magnitude - magnitudes[code - 1];
    if (down < up || (down == up && code % 2 == 1)) code -= 1;
  }
  return static_cast<uint16_t>(sign | code);
}

struct SlowQuantized {
  std::vector<uint8_t> scales;   // compact
  std::vector<uint8_t> codes;    // one a byte, also of E2M1
  std::vector<uint32_t> values;  // dequantized, fp32 bits
};

// x [rows, columns] in blocks of block_rows x block_columns; those at the end have what is left.
inline SlowQuantized slow_quantize(const SlowFormat& format, ScaleRule rule, const std::vector<double>& x, size_t columns,
                                   size_t block_rows, size_t block_columns) {
  const size_t across = (columns + block_columns - 1) / block_columns, down = (x.size() / columns + block_rows - 1) / block_rows;
  const auto block_of = [&](size_t i) { return i / columns / block_rows * across + i % columns / block_columns; };
  std::vector<double> amax(down * across, rule == ScaleRule::flashinfer ? kNan : 0.0);
  for (size_t i = 0; i < x.size(); ++i) {
    double& largest = amax[block_of(i)];
    const double magnitude = std::abs(x[i]);
    if (rule == ScaleRule::flashinfer)
      largest = std::fmax(largest, magnitude);  // passes over NaN
    else if (!std::isnan(largest))
      largest = std::isnan(magnitude) ? kNan : std::max(largest, magnitude);
  }
  std::vector<std::vector<double>> blocks(amax.size());
  for (size_t i = 0; i < x.size(); ++i) blocks[block_of(i)].push_back(x[i]);
  SlowQuantized out;
  for (size_t i = 0; i < amax.size(); ++i) {
    const bool searched = rule == ScaleRule::mse && std::isfinite(amax[i]);
    out.scales.push_back(searched ? slow_searched_scale(format, blocks[i]) : slow_scale(format, amax[i], rule));
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const uint8_t scale = out.scales[block_of(i)];
    out.codes.push_back(slow_code(format, x[i], scale, rule));
    out.values.push_back(fp32_bits(slow_value(format, out.codes.back(), scale, rule)));
  }
  return out;
}

}  // namespace mantissa::test
