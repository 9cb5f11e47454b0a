// Sixteen 16-bit lanes, one AVX2 register: bf16 values, or codes. g++ 12 takes comparisons of wider vectors apart lane by lane. bf16 has
// eight significant bits, so the scale rules, rounding and decoding of element.h and block_scale.h fit into 16-bit integer arithmetic
// wherever neither values nor elements are subnormal as bf16: where a scale code is above bias + mantissa bits and the block is finite
// ("regular"). The rest is for the scalar codecs.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/element.h"

namespace mantissa::lanes {

inline constexpr int64_t kLanes = 16, kPair = 2 * kLanes;
using Words = int16_t __attribute__((vector_size(32)));
using Unsigned = uint16_t __attribute__((vector_size(32)));

template <int64_t kCount>
using Groups = std::array<Words, static_cast<size_t>(kCount / kLanes)>;

namespace detail {
using Bytes = uint8_t __attribute__((vector_size(16)));
using Packed = uint8_t __attribute__((vector_size(8)));
using Quads = uint64_t __attribute__((vector_size(32)));
using TwoQuads = uint64_t __attribute__((vector_size(16)));
using PairBytes = uint8_t __attribute__((vector_size(32)));
using Half = int16_t __attribute__((vector_size(16)));
using HalfUnsigned = uint16_t __attribute__((vector_size(16)));
}  // namespace detail

// Goes through 64-bit lanes, because g++ 12 makes sixteen insertions of sixteen equal words.
[[gnu::always_inline]] inline Words broadcast(int value) {
  const uint64_t four = static_cast<uint16_t>(value) * uint64_t{0x0001000100010001};
  return reinterpret_cast<Words>(detail::Quads{four, four, four, four});
}
[[gnu::always_inline]] inline Words max(Words a, Words b) { return a > b ? a : b; }
[[gnu::always_inline]] inline Words min(Words a, Words b) { return a < b ? a : b; }
// Sums and differences modulo 2^16: lanes of irregular blocks leave the range of a word, but their results are not used.
[[gnu::always_inline]] inline Words wrapped_sum(Words a, Words b) {
  return reinterpret_cast<Words>(reinterpret_cast<Unsigned>(a) + reinterpret_cast<Unsigned>(b));
}
[[gnu::always_inline]] inline Words wrapped_difference(Words a, Words b) {
  return reinterpret_cast<Words>(reinterpret_cast<Unsigned>(a) - reinterpret_cast<Unsigned>(b));
}

[[gnu::always_inline]] inline Words load(const void* from) {
  Words out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
[[gnu::always_inline]] inline void store(int16_t* to, Words value) { std::memcpy(to, &value, sizeof value); }
// Stores bf16 bits as values.
[[gnu::always_inline]] inline void store(bf16* to, Words bits) { std::memcpy(&to->bits, &bits, sizeof bits); }
[[gnu::always_inline]] inline void store(float* to, Words bits) {
  using Wide = uint32_t __attribute__((vector_size(64)));
  const Wide wide = __builtin_convertvector(reinterpret_cast<Unsigned>(bits), Wide) << 16;
  std::memcpy(to, &wide, sizeof wide);
}
// Interleaves with zeros: g++ 12 makes one instruction of this, and four of __builtin_convertvector.
[[gnu::always_inline]] inline Words widened(detail::Bytes bytes) {
  return reinterpret_cast<Words>(__builtin_shufflevector(bytes, detail::Bytes{}, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8,
                                                         24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}
[[gnu::always_inline]] inline Words load_bytes(const uint8_t* from) {
  detail::Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return widened(bytes);
}
[[gnu::always_inline]] inline void store_bytes(uint8_t* to, Words value) {
  const auto bytes = __builtin_convertvector(value, detail::Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
}

// Copies `count` bytes, but no more than a vector has. memcpy of a length that is not constant becomes a call.
[[gnu::always_inline]] inline void copy_bytes(uint8_t* to, const uint8_t* from, int64_t count) {
  if (count >= kLanes) [[likely]]
    std::memcpy(to, from, kLanes);
  else
    std::memcpy(to, from, static_cast<size_t>(count));
}

// Codes of 16 or 32 elements, from and to memory: one a byte, or two.
template <class E, int64_t kCount>
[[gnu::always_inline]] inline Groups<kCount> load_codes(const uint8_t* from) {
  if constexpr (E::codes_per_byte == 1 && kCount == kLanes) {
    return {load_bytes(from)};
  } else if constexpr (E::codes_per_byte == 1) {
    return {load_bytes(from), load_bytes(from + kLanes)};
  } else {
    uint8_t packed[kLanes] = {};
    std::memcpy(packed, from, kCount / 2);
    const Words pairs = load_bytes(packed);
    const auto codes = std::bit_cast<std::array<detail::Bytes, 2>>((pairs | pairs << 4) & 0x0F0F);
    if constexpr (kCount == kLanes) return {widened(codes[0])};
    if constexpr (kCount != kLanes) return {widened(codes[0]), widened(codes[1])};
  }
}
template <class E>
[[gnu::always_inline]] inline void store_codes(uint8_t* to, Words codes) {
  if constexpr (E::codes_per_byte == 1) return store_bytes(to, codes);
  const auto pairs = reinterpret_cast<detail::Half>(__builtin_convertvector(codes, detail::Bytes));
  const auto packed = __builtin_convertvector((pairs | (pairs >> 4)) & 0xFF, detail::Packed);
  std::memcpy(to, &packed, sizeof packed);
}

template <class E>
[[gnu::always_inline]] inline void store_codes(uint8_t* to, Words low, Words high) {
  if constexpr (E::codes_per_byte == 1) {
    const auto codes =
        __builtin_shufflevector(reinterpret_cast<detail::PairBytes>(low), reinterpret_cast<detail::PairBytes>(high), 0, 2, 4, 6, 8, 10, 12,
                                14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62);
    std::memcpy(to, &codes, sizeof codes);
  } else {
    store_codes<E>(to, low);
    store_codes<E>(to + kLanes / E::codes_per_byte, high);
  }
}

[[gnu::always_inline]] inline Words magnitude(Words bits) { return bits & 0x7FFF; }

// Uses shuffles and subscripts, because g++ 12 sends copied vectors through the stack.
[[gnu::always_inline]] inline bool any(Words mask) {
  const detail::Half halves =
      __builtin_shufflevector(mask, mask, 0, 1, 2, 3, 4, 5, 6, 7) | __builtin_shufflevector(mask, mask, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto words = reinterpret_cast<detail::TwoQuads>(halves);
  return (words[0] | words[1]) != 0;
}

// The largest lane; no lane is negative.
[[gnu::always_inline]] inline int32_t largest(Words a) {
  detail::Half low, high;
  std::memcpy(&low, &a, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&a) + sizeof low, sizeof high);
  detail::Half q = low > high ? low : high;
  const auto fold = [&q](detail::Half other) __attribute__((always_inline)) { q = q > other ? q : other; };
  fold(__builtin_shufflevector(q, q, 4, 5, 6, 7, 0, 1, 2, 3));
  fold(__builtin_shufflevector(q, q, 2, 3, 0, 1, 6, 7, 4, 5));
  fold(__builtin_shufflevector(q, q, 1, 0, 3, 2, 5, 4, 7, 6));
  return q[0];
}

// The shift that multiplies by 2^(127 - scale) when it is subtracted from bf16 bits, and by 2^(scale - 127) when it is added.
[[gnu::always_inline]] inline Words exponent_shift(Words scale) { return (scale - 127) << 7; }

template <class E>
inline constexpr int kFirstRegularScale = E::bias + E::mantissa_bits + 1;

// A lane is above the k-th of these bf16 bits if and only if it rounds to subnormal element k + 1 or more: midpoints, ties to even.
template <class E>
constexpr auto subnormal_midpoints() {
  std::array<int16_t, size_t{1} << E::mantissa_bits> out{};
  for (int k = 0; k < (1 << E::mantissa_bits); ++k) {
    const int odd = 2 * k + 1;
    int exponent = 0;
    while ((odd >> (exponent + 1)) != 0) ++exponent;
    const int midpoint = ((127 - E::bias - E::mantissa_bits + exponent) << 7) | ((odd << (7 - exponent)) & 0x7F);
    out[static_cast<size_t>(k)] = static_cast<int16_t>(midpoint - k % 2);
  }
  return out;
}

// Codes of bf16 bits at the scale of `shift`: the larger of two results. `normal` rounds as a normal element; `subnormal` counts midpoints
// of subnormal elements that the magnitude exceeds, ties to even. Each result is right in its own range and not above the other
// one elsewhere, so the larger one is right everywhere.
template <class E>
[[gnu::always_inline]] inline Words encode(Words bits, Words shift) {
  constexpr int kDrop = 7 - E::mantissa_bits;
  constexpr int16_t kBelowHalf = (1 << (kDrop - 1)) - 1, kBias = (127 - E::bias) << E::mantissa_bits;
  const Words y = wrapped_difference(magnitude(bits), shift);
  const Words normal = (wrapped_sum(y, kBelowHalf + ((y >> kDrop) & 1)) >> kDrop) - kBias;
  Words subnormal{};
  constexpr auto kMidpoints = subnormal_midpoints<E>();
#pragma GCC unroll 8
  for (const int16_t midpoint : kMidpoints) subnormal -= y > midpoint;
  const Words code = min(max(normal, subnormal), broadcast(E::max_code));
  const auto sign = reinterpret_cast<Words>(reinterpret_cast<Unsigned>(bits) >> (16 - E::bits)) & static_cast<int16_t>(E::sign_bit);
  return code | sign;
}

// Like encode(), but only where no element lies strictly between zero and the smallest normal element; sets the lanes of `small` where one
// might.
template <class E>
[[gnu::always_inline]] inline Words encode_normal(Words bits, Words shift, Words& small) {
  constexpr int kDrop = 7 - E::mantissa_bits, kBias = (127 - E::bias) << 7;
  constexpr int16_t kBelowHalf = (1 << (kDrop - 1)) - 1;
  // Magnitudes that do not round to zero begin mantissa_bits + 1 binades below the smallest normal element; this grid has kNormal codes in
  // each binade.
  constexpr int16_t kNormal = 1 << E::mantissa_bits, kBinades = (E::mantissa_bits + 1) << E::mantissa_bits;
  const Words m = magnitude(bits);
  const Words above = wrapped_difference(m, shift + static_cast<int16_t>(kBias - kBelowHalf));
  const Words code = wrapped_sum(above, (m >> kDrop) & 1) >> kDrop;
  small |= reinterpret_cast<Words>(reinterpret_cast<Unsigned>(code + static_cast<int16_t>(kBinades - kNormal)) <
                                   static_cast<uint16_t>(kBinades));
  const auto sign = reinterpret_cast<Words>(reinterpret_cast<Unsigned>(bits) >> (16 - E::bits)) & static_cast<int16_t>(E::sign_bit);
  return min(max(code, Words{}), broadcast(E::max_code)) | sign;
}

// bf16 bits of codes at the scale of `shift`; lanes of `foreign` are set where a code is no finite element.
template <class E>
[[gnu::always_inline]] inline Words decode(Words code, Words shift, Words& foreign) {
  const Words m = code & static_cast<int16_t>(E::magnitude_mask);
  foreign |= m > static_cast<int16_t>(E::max_code);
  constexpr int kRaise = 7 - E::mantissa_bits, kBias = 127 - E::bias;
  Words bits = (m << kRaise) + static_cast<int16_t>(kBias << 7);
  // A subnormal element m with the leading bit p is 2^p (1 + (m - 2^p) / 2^p) steps.
  for (int p = E::mantissa_bits - 1; p >= 0; --p) {
    // Named: with sanitizers g++ 12 takes a cast in place for an int, which does not fit a lane.
    const auto first = static_cast<int16_t>(1 << p), above = static_cast<int16_t>(2 << p);
    const auto exponent = static_cast<int16_t>((kBias - E::mantissa_bits + p + 1) << 7);
    bits = m < above ? ((m - first) << (7 - p)) + exponent : bits;
  }
  bits = m == 0 ? Words{} : wrapped_sum(bits, shift);
  const auto sign = reinterpret_cast<Unsigned>(code & static_cast<int16_t>(E::sign_bit)) << (16 - E::bits);
  return bits | reinterpret_cast<Words>(sign);
}

// Like decode(), but only where every code is zero or a normal element; sets the lanes of `other` where one is not.
template <class E>
[[gnu::always_inline]] inline Words decode_normal(Words code, Words shift, Words& other) {
  constexpr int kRaise = 7 - E::mantissa_bits, kNormal = 1 << E::mantissa_bits;
  const Words m = code & static_cast<int16_t>(E::magnitude_mask), zero = m == 0;
  other |= reinterpret_cast<Words>(reinterpret_cast<Unsigned>(m - static_cast<int16_t>(kNormal)) >
                                   static_cast<uint16_t>(E::max_code - kNormal)) &
           ~zero;
  const Words bits = wrapped_sum(m << kRaise, shift + static_cast<int16_t>((127 - E::bias) << 7)) & ~zero;
  const auto sign = reinterpret_cast<Unsigned>(code & static_cast<int16_t>(E::sign_bit)) << (16 - E::bits);
  return bits | reinterpret_cast<Words>(sign);
}

// table[index], lane by lane. clang-tidy does not know the instruction.
template <class Lanes>
[[gnu::always_inline]] inline Lanes looked_up(Lanes table, Lanes index) {
  if constexpr (requires { __builtin_shuffle(table, index); }) return __builtin_shuffle(table, index);
  Lanes out;
  for (int i = 0; i < kLanes; ++i) out[i] = table[index[i]];
  return out;
}

// The bf16 bits of all elements of a four-bit format at the scale of `shift`.
template <class E>
[[gnu::always_inline]] inline Words all_elements(Words shift) {
  constexpr Words kCodes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Words foreign{};
  return decode<E>(kCodes, shift, foreign);
}

// block_scale() for the bf16 bits of the amax of a block that is covered, or of zeros. A lane of a comparison that holds is -1, so
// subtracting it adds one. It relies on range.most >= 127, which ScaleRange promises: with a lower one, encode() would subtract a negative
// shift from a large magnitude, and the difference could reach the sign bit.
template <class E>
[[gnu::always_inline]] inline Words scale_of(Words amax, ScaleRule rule, ScaleRange range) {
  const auto kept = static_cast<int16_t>(largest_kept_fraction<E>(rule) >> 16);
  const Words scale = (amax >> 7) - static_cast<int16_t>(E::emax) - ((amax & 0x7F) > kept);
  return min(max(scale, broadcast(range.least)), broadcast(range.most));
}

// Eight fp32 lanes. They sum the errors of ScaleErrors exactly, in units of 1 and in any order: elements of bf16 are multiples of 2^-10
// where they count, so errors are multiples of 2^-11, and those of kMostSearched elements stay below 2^13.
using Floats = float __attribute__((vector_size(32)));
inline constexpr int64_t kMostSearched = 256;
// Exponents of amax, and with them of floor's scale, from which on no element that counts is subnormal.
inline constexpr int16_t kFirstSearchedAmax = 8 << 7;
// Largest bits of a fraction of amax with which twice floor's scale is never better.
inline constexpr int kNeverAbove = static_cast<int>(largest_kept_fraction<E2M1>(ScaleRule::mse) >> 16);

namespace detail {
using Integers = uint32_t __attribute__((vector_size(32)));
using FourFloats = float __attribute__((vector_size(16)));

[[gnu::always_inline]] inline Floats positive(Floats a) { return a > 0.0F ? a : Floats{}; }
[[gnu::always_inline]] inline Floats absolute(Floats a) { return reinterpret_cast<Floats>(reinterpret_cast<Integers>(a) & 0x7FFFFFFFU); }
[[gnu::always_inline]] inline float sum(Floats a) {
  FourFloats low, high;
  std::memcpy(&low, &a, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&a) + sizeof low, sizeof high);
  FourFloats q = low + high;
  q += __builtin_shufflevector(q, q, 2, 3, 0, 1);
  return q[0] + q[1];
}
}  // namespace detail

// ScaleErrors::below and above of eight elements, from their magnitudes at floor's scale.
[[gnu::always_inline]] inline Floats errors_below(Floats t) {
  const Floats saved = detail::positive(0.125F - detail::absolute(detail::absolute(t - 0.5F) - 0.25F));
  return 2.0F * detail::positive(t - 3.5F) + 4.0F * detail::positive(t - 5.0F) - 0.5F * saved;
}
[[gnu::always_inline]] inline Floats errors_above(Floats t) {
  const Floats added = detail::positive(0.25F - detail::absolute(detail::absolute(t - 1.0F) - 0.5F));
  return added - 4.0F * detail::positive(t - 7.0F);
}

// The sum of what `errors` gives for `count` elements, a multiple of sixteen, of a block whose amax has these bits. Elements from which the
// shift takes more than their exponent are negative or tiny afterwards: they count as zeros.
template <class Errors>
[[gnu::always_inline]] inline float sum_of_errors(const bf16* x, int64_t count, int16_t amax, const Errors& errors) {
  const Words shift = broadcast((amax & 0x7F80) - ((127 + E2M1::emax) << 7));
  Floats sums{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Words scaled = max(wrapped_difference(magnitude(load(x + i)), shift), Words{});
    const auto halves = std::bit_cast<std::array<detail::HalfUnsigned, 2>>(scaled);
    for (const detail::HalfUnsigned half : halves)
      sums += errors(reinterpret_cast<Floats>(__builtin_convertvector(half, detail::Integers) << 16));
  }
  return detail::sum(sums);
}

// Lanes whose block the functions above do not cover; they do cover blocks of zeros.
template <class E>
[[gnu::always_inline]] inline Words irregular(Words amax, Words scale) {
  return ((scale < static_cast<int16_t>(kFirstRegularScale<E>)) & (amax != 0)) | (amax >= 0x7F80);
}

}  // namespace mantissa::lanes
