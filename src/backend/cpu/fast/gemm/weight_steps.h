// Reads a row of a weight 64 columns at a time, as the GEMMs of a few rows do (few_rows_gemm.h): eight vectors of fp32 lanes that hold the
// exact values of bf16, E4M3 or E2M1 elements. A lane holds the column that takes the fewest instructions to put there; column() says
// which, and the other operand is laid out alike.
//
// A format of steps has
//   kBytes                         bytes of 64 columns
//   column(vector, lane)           in [0, 64)
//   kScaled                        true if there are codes and scales
//   Scale, scale(code)             what is kept of the scale of 32 columns, made once for a row
//   extreme(code)                  1 if this scale is extreme (backend.h, Gemm), else 0
//   zero(from)                     true if all elements of 32 columns are zero
//   kPlainSteps                    if it is not 0, so many steps are looked at before they are read:
//   plain(from, steps)             true if read<true>() will do for them, which takes fewer instructions
//   Part                           the type that read() gives: a vector, or two beside each other, of which the first has an even number
//   read<kPlain>(from, scales, take)  calls take(vector, part) for each of the eight, in a fixed order; false if an element is NaN
//   add(sum, step, scales)         sum + step, of lanes as in a part, step being a sum of products of what read() gave
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "backend/cpu/fast/codes/code_lanes.h"
#include "backend/cpu/fast/simd.h"

namespace mantissa::wide {

// Instructions on vectors of 64 bytes, for bodies that run at x86-64-v4 alone (simd.h), and of 32 bytes, for those from x86-64-v3 on: g++
// 12 takes apart what they do where it is written out, and an intrinsic could not be inlined into a clone. All are templates because a
// compiler without levels (kCpuLevels) checks the operands of an assembly at the level of the build, but only of what is instantiated.

// a * b + c in fp32 lanes.
template <class Floats>
[[gnu::always_inline]] inline Floats fma(Floats a, Floats b, Floats c) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "vm"(b));
  return c;
}

// 32 bytes of any alignment, twice.
template <class Bytes>
[[gnu::always_inline]] inline Bytes twice(const std::byte* from) {
  static_assert(sizeof(Bytes) == 64);
  using Half = uint8_t __attribute__((vector_size(32), aligned(1)));
  Bytes out;
  asm("vbroadcasti64x4 %1, %0" : "=v"(out) : "m"(*reinterpret_cast<const Half*>(from)));
  return out;
}

// Returns true if a < b in any unsigned byte.
template <class Bytes>
[[gnu::always_inline]] inline bool any_below(Bytes a, Bytes b) {
  bool any;
  asm("vpcmpub $1, %2, %1, %%k1\n\tkortestq %%k1, %%k1" : "=@ccnz"(any) : "v"(a), "v"(b) : "k1");
  return any;
}
// Returns true if a == b in any 16-bit lane.
template <class Pairs>
[[gnu::always_inline]] inline bool any_equal(Pairs a, Pairs b) {
  bool any;
  asm("vpcmpeqw %2, %1, %%k1\n\tkortestd %%k1, %%k1" : "=@ccnz"(any) : "v"(a), "v"(b) : "k1");
  return any;
}

// a + b in the 16-bit lanes in which no bit of the mask is set in a, else a.
template <class Pairs>
[[gnu::always_inline]] inline Pairs add_where_clear(Pairs a, Pairs mask, Pairs b) {
  Pairs out = a;
  asm("vptestnmw %[mask], %[a], %%k1\n\tvpaddw %[b], %[a], %[out]%{%%k1%}"
      : [out] "+v"(out)
      : [a] "v"(a), [mask] "v"(mask), [b] "v"(b)
      : "k1");
  return out;
}
// a + b in the 16-bit lanes in which a bit of the mask is set in `where`, else `where`.
template <class Pairs>
[[gnu::always_inline]] inline Pairs add_where_set(Pairs where, Pairs mask, Pairs a, Pairs b) {
  Pairs out = where;
  asm("vptestmw %[mask], %[where], %%k1\n\tvpaddw %[b], %[a], %[out]%{%%k1%}"
      : [out] "+v"(out)
      : [where] "v"(where), [mask] "v"(mask), [a] "v"(a), [b] "v"(b)
      : "k1");
  return out;
}

// table[lowest bits of the index] in 16-bit and 32-bit lanes of 64 bytes, and of bytes within each 16 of 32 or 64, there 0 for an index of
// 128 or more.
template <class Pairs>
[[gnu::always_inline]] inline Pairs looked_up_pairs(Pairs table, Pairs index) {
  Pairs out;
  asm("vpermw %1, %2, %0" : "=v"(out) : "v"(table), "v"(index));
  return out;
}
template <class Floats, class Words>
[[gnu::always_inline]] inline Floats looked_up_words(Floats table, Words index) {
  Floats out;
  asm("vpermps %1, %2, %0" : "=v"(out) : "v"(table), "v"(index));
  return out;
}
template <class Bytes>
[[gnu::always_inline]] inline Bytes looked_up_bytes(Bytes table, Bytes index) {
  Bytes out;
  asm("vpshufb %2, %1, %0" : "=v"(out) : "v"(table), "v"(index));
  return out;
}

}  // namespace mantissa::wide

namespace mantissa::steps {

inline constexpr int64_t kStep = 64, kVectors = kStep / simd::kLanes, kSpan = 32, kSpans = kStep / kSpan;

namespace detail {
using Words32 = uint32_t __attribute__((vector_size(32)));
using Bytes = uint8_t __attribute__((vector_size(32)));
using Words64 = uint32_t __attribute__((vector_size(64)));
using Pairs64 = int16_t __attribute__((vector_size(64)));
using Quads64 = uint64_t __attribute__((vector_size(64)));
using Bytes64 = uint8_t __attribute__((vector_size(64)));

template <class To, class From>
[[gnu::always_inline]] inline To as(From from) {
  return reinterpret_cast<To>(from);
}
template <class T>
[[gnu::always_inline]] inline T load(const std::byte* from) {
  T out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// extreme_scale() without a branch.
template <class E>
[[gnu::always_inline]] inline uint32_t extreme(uint32_t code) {
  constexpr uint32_t kFirst = E::bias + E::mantissa_bits, kLast = 254 - E::emax;
  return code - kFirst > kLast - kFirst ? 1U : 0U;
}

template <class E>
[[gnu::always_inline]] inline bool zero(const std::byte* from) {
  constexpr int kMagnitudes = static_cast<int>(E::magnitude_mask * (E::codes_per_byte == 1 ? 1 : 0x11));
  int any = 0;
  for (int64_t i = 0; i < kSpan / E::codes_per_byte; ++i) any |= std::to_integer<int>(from[i]) & kMagnitudes;
  return any == 0;
}

// The lower and the upper bf16 of eight words, as vectors `low` and `high`; of sixteen, as two vectors each.
template <class Take>
[[gnu::always_inline]] inline void widen(Pairs64 pairs, int64_t low, int64_t high, const Take& take) {
  const auto words = as<Words64>(pairs);
  take(low, as<simd::TwoFloats>(words << 16));
  take(high, as<simd::TwoFloats>(words & 0xFFFF0000U));
}
template <class Pairs, class Take>
[[gnu::always_inline]] inline void widen(Pairs pairs, int64_t low, int64_t high, const Take& take) {
  const auto words = as<Words32>(pairs);
  take(low, as<simd::Floats>(words << 16));
  take(high, as<simd::Floats>(words & 0xFFFF0000U));
}

}  // namespace detail

struct NoScale {};

// Values in high precision, without scales.
template <class T>
struct Values {
  using Scale = NoScale;
  using Part = simd::Floats;
  static constexpr bool kScaled = false;
  static constexpr int64_t kPlainSteps = 0;
  static constexpr int64_t kBytes = kStep * static_cast<int64_t>(sizeof(T));
  static constexpr int64_t column(int64_t vector, int64_t lane) {
    return sizeof(T) == 4 ? 8 * vector + lane : 16 * (vector / 2) + 2 * lane + vector % 2;
  }

  template <bool, class Take>
  [[gnu::always_inline]] static bool read(const std::byte* from, const Scale*, const Take& take) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVectors; v += 2) {
      const std::byte* at = from + v * 8 * static_cast<int64_t>(sizeof(T));
      if constexpr (sizeof(T) == 2) {
        detail::widen(detail::load<detail::Words32>(at), v, v + 1, take);
      } else {
        take(v, detail::load<simd::Floats>(at));
        take(v + 1, detail::load<simd::Floats>(at + sizeof(simd::Floats)));
      }
    }
    return true;
  }
  [[gnu::always_inline]] static Part add(Part sum, Part step, const Scale*) { return sum + step; }
};

// In 16-bit lanes a normal element becomes the bf16 of its value by one addition to its exponent, into which the scale goes as well.
// Zeros and subnormal elements, rare but in blocks of zeros, take more instructions.
template <bool kWide = false>  // for AVX-512: one instruction for two vectors
struct E4M3Codes {
  using Part = std::conditional_t<kWide, simd::TwoFloats, simd::Floats>;
  using Scale = uint32_t;  // twice what is added to the bits of an element to make them those of a bf16
  static constexpr bool kScaled = true;
  static constexpr int64_t kPlainSteps = 4;
  static constexpr int64_t kBytes = kStep;
  static constexpr int64_t column(int64_t vector, int64_t lane) { return kSpan * (vector / 4) + 4 * lane + vector % 4; }
  [[gnu::always_inline]] static Scale scale(uint32_t code) { return ((code - E4M3::bias) << 7 & 0xFFFFU) | (code - E4M3::bias) << 23; }
  [[gnu::always_inline]] static uint32_t extreme(uint32_t code) { return detail::extreme<E4M3>(code); }
  [[gnu::always_inline]] static bool zero(const std::byte* from) { return detail::zero<E4M3>(from); }

  // Looks at codes that are doubled, so that they lose their signs, plus two: NaN is 0, zero 2, subnormal elements are 4 to 16, normal ones
  // 18 to 254.
  [[gnu::always_inline]] static bool plain(const std::byte* from, int64_t steps) {
    using Bytes = std::conditional_t<kWide, detail::Bytes64, detail::Bytes>;
    constexpr auto kEach = static_cast<int64_t>(sizeof(Bytes));
    Bytes least = ~Bytes{};
#pragma GCC unroll 8
    for (int64_t i = 0; i < steps * kStep / kEach; ++i) {
      const auto codes = detail::load<Bytes>(from + i * kEach), x = codes + codes + 2;
      least = x < least ? x : least;
    }
    return !any_below_normal(least);
  }

  template <bool kPlain, class Take>
  [[gnu::always_inline]] static bool read(const std::byte* from, const Scale* scales, const Take& take) {
    bool numbers = true;
    lanes::Words foreign{};
#pragma GCC unroll 2
    for (int64_t i = 0; i < kSpans; ++i) {
      constexpr auto kFields = static_cast<int16_t>(0x87F0);
      if constexpr (kWide) {
        const auto scale = detail::as<detail::Pairs64>(detail::Words64{} + scales[i]);
        const auto fields = (detail::as<detail::Pairs64>(wide::twice<detail::Bytes64>(from + i * kSpan)) << kLowOrHigh) >> 4 & kFields;
        if constexpr (!kPlain) numbers &= !any_nan(fields);
        detail::widen(kPlain ? fields + scale : scaled(fields, scale), 4 * i, 4 * i + 2, take);
      } else {
        const auto codes = detail::load<lanes::Words>(from + i * kSpan), scale = detail::as<lanes::Words>(detail::Words32{} + scales[i]);
        if constexpr (kPlain) {
          detail::widen((((codes << 8) >> 4) & kFields) + scale, 4 * i, 4 * i + 2, take);
          detail::widen(((codes >> 4) & kFields) + scale, 4 * i + 1, 4 * i + 3, take);
        } else {
          const lanes::Words shift = scale - static_cast<int16_t>((127 - E4M3::bias) << 7);
          detail::widen(lanes::decode<E4M3>(codes & 0xFF, shift, foreign), 4 * i, 4 * i + 2, take);
          detail::widen(lanes::decode<E4M3>((codes >> 8) & 0xFF, shift, foreign), 4 * i + 1, 4 * i + 3, take);
        }
      }
    }
    return numbers && (kPlain || kWide || !lanes::any(foreign));
  }
  [[gnu::always_inline]] static Part add(Part sum, Part step, const Scale*) { return sum + step; }

 private:
  // Shift counts: in the first 16 lanes the even bytes of 32 codes come to the upper half of a lane, in the others the odd ones stay there.
  static constexpr detail::Pairs64 kLowOrHigh = {8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8};

  [[gnu::always_inline]] static bool any_below_normal(detail::Bytes least) { return lanes::any(detail::as<lanes::Words>(least < 18)); }
  [[gnu::always_inline]] static bool any_below_normal(detail::Bytes64 least) { return wide::any_below(least, detail::Bytes64{} + 18); }
  [[gnu::always_inline]] static bool any_nan(detail::Pairs64 fields) {
    const detail::Pairs64 magnitudes = detail::Pairs64{} + kMagnitude;
    return wide::any_equal(fields & magnitudes, magnitudes);
  }
  // Adds the scale to the fields of elements. The fields of a subnormal element m first become those of the value m 2^-9; a zero stays one.
  [[gnu::always_inline]] static detail::Pairs64 scaled(detail::Pairs64 fields, detail::Pairs64 scale) {
    constexpr detail::Pairs64 kToNormal = {0, -272, -160, -112, -64, -48, -32, -16};
    const detail::Pairs64 exponents = detail::Pairs64{} + kExponent, magnitudes = detail::Pairs64{} + kMagnitude;
    const detail::Pairs64 normal = wide::add_where_clear(fields, exponents, wide::looked_up_pairs(kToNormal, fields >> 4));
    return wide::add_where_set(fields, magnitudes, normal, scale);
  }
  static constexpr int16_t kExponent = 0x0780, kMagnitude = 0x07F0;
};

// Reads twice the element, which is at least one if it is not zero: products are subnormal only where the other operand is. Sums of a step
// are scaled as a whole; that is exact. Lanes 0 to 3 are of the first 32 columns, lanes 4 to 7 of the others.
template <bool kShuffles = true, bool kWide = false>  // AVX2's; for AVX-512: the values of sixteen codes by one instruction
struct E2M1Codes {
  using Part = std::conditional_t<kWide, simd::TwoFloats, simd::Floats>;
  using Scale = float;  // half of the block's
  static constexpr bool kScaled = true;
  static constexpr int64_t kPlainSteps = 0;
  static constexpr int64_t kBytes = kStep / 2;
  static constexpr int64_t column(int64_t vector, int64_t lane) {
    constexpr int64_t kWithin[] = {0, 2, 1, 3};
    return kSpan * (lane / 4) + 16 * (vector / 4) + 4 * (lane % 4) + kWithin[vector % 4];
  }
  [[gnu::always_inline]] static Scale scale(uint32_t code) { return std::bit_cast<float>((code - (code != 0 ? 1U : 0U)) << 23); }
  [[gnu::always_inline]] static uint32_t extreme(uint32_t code) { return detail::extreme<E2M1>(code); }
  [[gnu::always_inline]] static bool zero(const std::byte* from) { return detail::zero<E2M1>(from); }

  template <bool, class Take>
  [[gnu::always_inline]] static bool read(const std::byte* from, const Scale*, const Take& take) {
    if constexpr (kWide) {
      const detail::Bytes64 codes = wide::twice<detail::Bytes64>(from);
      const detail::Words64 first = spread<0>(codes), second = spread<8>(codes);
      take(0, looked_up(first)), take(4, looked_up(second));
      take(2, looked_up(first >> 4)), take(6, looked_up(second >> 4));
    } else {
      const auto pairs = detail::load<lanes::Words>(from);
      lanes::Words bits[2];
      elements(pairs & 0x0F0F, bits);
      detail::widen(bits[0], 0, 1, take);
      detail::widen(bits[1], 4, 5, take);
      elements((pairs >> 4) & 0x0F0F, bits);
      detail::widen(bits[0], 2, 3, take);
      detail::widen(bits[1], 6, 7, take);
    }
    return true;
  }
  [[gnu::always_inline]] static Part add(Part sum, Part step, const Scale* scales) {
    if constexpr (kWide) {
      const auto both = detail::as<simd::TwoFloats>(detail::Quads64{} + detail::load<uint64_t>(reinterpret_cast<const std::byte*>(scales)));
      return wide::fma(step, __builtin_shufflevector(both, both, 0, 0, 0, 0, 5, 5, 5, 5, 8, 8, 8, 8, 13, 13, 13, 13), sum);
    } else {
      const float a = scales[0], b = scales[1];
      return simd::fma(step, simd::Floats{a, a, a, a, b, b, b, b}, sum);
    }
  }

 private:
  // The even ones of eight bytes of each half, from byte kFirst on, and beside them the odd ones, each as the lowest byte of a word.
  template <int kFirst>
  [[gnu::always_inline]] static detail::Words64 spread(detail::Bytes64 codes) {
    constexpr uint32_t k = kFirst;
    constexpr detail::Words64 kIndex = {k,     k + 2, k + 4, k + 6, k,     k + 2, k + 4, k + 6,
                                        k + 1, k + 3, k + 5, k + 7, k + 1, k + 3, k + 5, k + 7};
    return detail::as<detail::Words64>(wide::looked_up_bytes(codes, detail::as<detail::Bytes64>(kIndex)));
  }
  // The doubled element of the lowest four bits of each word; the instruction looks at no others.
  [[gnu::always_inline]] static simd::TwoFloats looked_up(detail::Words64 codes) {
    constexpr simd::TwoFloats kDoubled = {0, 1, 2, 3, 4, 6, 8, 12, -0.0F, -1, -2, -3, -4, -6, -8, -12};
    return wide::looked_up_words(kDoubled, codes);
  }
  // bf16 of doubled elements, of a code in each byte: the first and the last eight of each half.
  [[gnu::always_inline]] static void elements(lanes::Words codes, lanes::Words* bits) {
    detail::Bytes lower{}, upper = detail::as<detail::Bytes>(codes);
    if constexpr (kShuffles) {
      using Quads = uint64_t __attribute__((vector_size(32)));
      constexpr uint64_t kLower = 0x4000C08040008000, kUpper = 0x4141404040403F00, kSigns = 0x8080808080808080;
      constexpr Quads kLowerBytes = {kLower, kLower, kLower, kLower}, kUpperBytes = {kUpper, kUpper | kSigns, kUpper, kUpper | kSigns};
      lower = wide::looked_up_bytes(detail::as<detail::Bytes>(kLowerBytes), upper);
      upper = wide::looked_up_bytes(detail::as<detail::Bytes>(kUpperBytes), upper);
      bits[0] = interleaved<0>(lower, upper), bits[1] = interleaved<8>(lower, upper);
    } else {
      bits[0] = element(interleaved<0>(upper, lower)), bits[1] = element(interleaved<8>(upper, lower));
    }
  }
  template <int kFirst>
  [[gnu::always_inline]] static lanes::Words interleaved(detail::Bytes a, detail::Bytes b) {
    return [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
      return detail::as<lanes::Words>(__builtin_shufflevector(a, b, (I / 16 * 16 + kFirst + I % 16 / 2 + I % 2 * 32)...));
    }
    (std::make_integer_sequence<int, 32>());
  }
  [[gnu::always_inline]] static lanes::Words element(lanes::Words code) {
    constexpr int16_t kOne = 127 << 7;
    const lanes::Words m = code & 7, bits = m > 1 ? (m << 6) + kOne : -m & kOne;  // both sides are computed: neither may overflow
    return bits | ((code & 8) << 12);
  }
};

}  // namespace mantissa::steps
