// Muon (Jordan et al. 2024) of one element, and moments that are kept in bf16. The order of operations is part of the contract: all
// backends give the same bits.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "backend/adamw_rule.h"
#include "mantissa/backend/backend.h"
#include "mantissa/base/host_device.h"

namespace mantissa {

inline constexpr double kSmallestNorm = 1e-7;  // by which DivideByNorm divides

template <class S>
struct MuonMomentumRule {
  S momentum, one_minus_momentum;
  bool nesterov;

  explicit MuonMomentumRule(const MuonMomentum& k)
      : momentum(static_cast<S>(k.momentum)), one_minus_momentum(static_cast<S>(1.0 - k.momentum)), nesterov(k.nesterov) {}

  // Returns what is orthogonalized.
  MANTISSA_HOST_DEVICE S apply(const AdamWStep<S>& step, S& m, S grad) const {
    const S g = grad * step.clip_factor;
    m = momentum * m + one_minus_momentum * g;
    return nesterov ? one_minus_momentum * g + momentum * m : m;
  }
};

template <class S>
struct MuonUpdateRule {
  S scale, weight_decay;

  explicit MuonUpdateRule(const MuonUpdate& k) : scale(static_cast<S>(k.scale)), weight_decay(static_cast<S>(k.weight_decay)) {}

  MANTISSA_HOST_DEVICE void apply(const AdamWStep<S>& step, S& master, S direction) const {
    master -= step.lr * (scale * direction + weight_decay * master);
  }
};

// The random words of moments (MomentRounding) of an operand. Rows that are adjacent count as one.
struct MomentWords {
  MomentRounding rounding;
  int64_t columns;

  MomentWords(const MomentRounding& of, const Shape& shape) : rounding(of), columns(shape.rank() > 0 ? shape[-1] : 1) {
    if (of.row_stride == 0 || of.row_stride == columns) columns = rounding.row_stride = std::numeric_limits<int64_t>::max();
  }
  MANTISSA_HOST_DEVICE uint64_t number(int64_t i) const {
    return rounding.first + static_cast<uint64_t>(i / columns * rounding.row_stride + i % columns);
  }
  // Returns the words of the four numbers from 4 (number / 4) on.
  MANTISSA_HOST_DEVICE std::array<uint32_t, 4> of_four(uint64_t number) const {
    return random_words({rounding.seed, RngStream::moments}, rounding.what, number / 4);
  }
  MANTISSA_HOST_DEVICE static bf16 first_moment(float m, uint32_t word) { return to_bf16_at_random(m, word); }
  MANTISSA_HOST_DEVICE static bf16 second_moment(float v, uint32_t word) { return to_bf16_at_random(v, word >> 16); }
};

}  // namespace mantissa
