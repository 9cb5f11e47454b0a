// Moments as they are stored: as they are, or rounded to bf16 with the random words of their elements (MomentRounding).
#pragma once

#include <array>
#include <cstdint>

#include "backend/muon_rule.h"

namespace mantissa {

template <class M>
struct StoredMoments {
  StoredMoments(const MomentRounding&, const Shape&) {}
  static M first(M m, int64_t) { return m; }
  static M second(M v, int64_t) { return v; }
};

template <>
struct StoredMoments<bf16> {
  StoredMoments(const MomentRounding& rounding, const Shape& shape) : words_(rounding, shape) {}

  // Take the value of element i of the operand; elements that follow each other share what is drawn.
  template <class S>
  bf16 first(S m, int64_t i) {
    return MomentWords::first_moment(static_cast<float>(m), word(i));
  }
  template <class S>
  bf16 second(S v, int64_t i) {
    return MomentWords::second_moment(static_cast<float>(v), word(i));
  }

 private:
  uint32_t word(int64_t i) {
    const uint64_t number = words_.number(i);
    if (number / 4 != drawn_) drawn_ = number / 4, four_ = words_.of_four(number);
    return four_[number % 4];
  }

  MomentWords words_;
  uint64_t drawn_ = ~uint64_t{0};
  std::array<uint32_t, 4> four_{};
};

}  // namespace mantissa
