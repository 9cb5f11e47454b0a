// Scales of one or two levels, and random words, which the kernels that round to formats without codes share.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "backend/cpu/quantized_rows.h"
#include "mantissa/backend/backend.h"
#include "mantissa/base/rng.h"
#include "mantissa/formats/free_rounding.h"

namespace mantissa {

inline constexpr float kLargestFp32 = std::numeric_limits<float>::max();

template <class T>
[[gnu::always_inline]] inline T narrowed(float value) {
  if constexpr (std::is_same_v<T, bf16>) {
    return to_bf16(value);
  } else {
    return value;
  }
}

template <class T>
[[gnu::always_inline]] inline float widened(T value) {
  return float_of_bits(fp32_bits(value));
}

// The scale of a block: x times `encode` is rounded to an element, and an element stands for itself times `decode`, times `tensor`.
class SimulatedBlock {
 public:
  // The scale of a block of this amax, in a tensor of that, for elements up to `largest`.
  static SimulatedBlock make(uint32_t amax, uint32_t tensor_amax, const Simulation& how, float largest) {
    if (how.scale == SimulatedScale::e8m0) {
      const uint8_t scale = block_scale(amax, how.element.facts(), how.rule);
      if (scale == kScaleNan) return SimulatedBlock();
      return {power_of_two(127 - scale), power_of_two(scale - 127), 1.0F, false};
    }
    if (tensor_amax >= kFp32Inf) return SimulatedBlock();
    const float encode = std::fmin(448.0F * largest / float_of_bits(tensor_amax), kLargestFp32), decode = 1.0F / encode;
    const float wanted = std::fmin(float_of_bits(amax) * (encode * (1.0F / largest)), 448.0F);
    const float scale = float_of_bits(E4M3::decode(E4M3::encode(fp32_bits(wanted), 127), 127));
    return {std::fmin(1.0F / (scale * decode), kLargestFp32), scale, decode, true};
  }

  bool poisoned() const { return std::isnan(decode_); }
  double encode() const { return encode_; }
  double decode() const { return decode_; }
  float tensor() const { return tensor_; }
  // Multiplies in fp32 where scales have two levels; exact for powers of two.
  double scaled(float x) const { return narrow_ ? double{x * static_cast<float>(encode_)} : double{x} * encode_; }
  float value(double element) const { return static_cast<float>(element * decode_) * tensor_; }
  // 127 + floor(log2 scale) as far as a byte has it; 255 for no scale.
  uint8_t exponent() const {
    const double scale = decode_ * double{tensor_};
    return poisoned() ? 255 : scale == 0.0 ? 0 : static_cast<uint8_t>(std::clamp(std::ilogb(scale) + 127, 0, 254));
  }

 private:
  SimulatedBlock() = default;
  SimulatedBlock(double encode, double decode, float tensor, bool narrow)
      : encode_(encode), decode_(decode), tensor_(tensor), narrow_(narrow) {}

  double encode_ = 1.0, decode_ = std::numeric_limits<double>::quiet_NaN();
  float tensor_ = 1.0F;
  bool narrow_ = false;
};

// Random words of elements; those of four neighbors are drawn together.
class ElementWords {
 public:
  explicit ElementWords(const RoundingDraws& draws) : draws_(draws) {}
  uint64_t number(int64_t row, int64_t column) const {
    const auto place = [](const std::vector<int64_t>& places, int64_t i) { return places.empty() ? i : places[static_cast<size_t>(i)]; };
    return draws_.first + static_cast<uint64_t>(place(draws_.row_places, row)) * static_cast<uint64_t>(draws_.columns) +
           static_cast<uint64_t>(place(draws_.column_places, column));
  }
  uint32_t operator()(int64_t row, int64_t column) {
    const uint64_t number = this->number(row, column);
    if (number / 4 != drawn_) words_ = random_words({draws_.seed, RngStream::rounding}, draws_.what, drawn_ = number / 4);
    return words_[number % 4];
  }

 private:
  const RoundingDraws& draws_;
  uint64_t drawn_ = ~uint64_t{0};
  std::array<uint32_t, 4> words_{};
};

// Calls body.operator()<X, T>() for the dtypes of x and out.
template <class Body>
void with_dtypes(const Simulate& k, const Body& body) {
  if (k.out.dtype() == Dtype::bf16) return body.template operator()<bf16, bf16>();
  k.x.dtype() == Dtype::f32 ? body.template operator()<float, float>() : body.template operator()<bf16, float>();
}

}  // namespace mantissa
