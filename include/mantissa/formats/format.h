// The names of the element formats and scale rules of block-scaled ("MX") tensors, and their facts as numbers. The codecs are templates
// over the format: element.h, block_scale.h.
#pragma once

#include <cstdint>

#include "mantissa/base/host_device.h"

namespace mantissa {

// none: high precision. E4M3 is the finite ("FN") variant. OCP Microscaling Formats v1.0. nvfp4: E2M1 under scales of two levels, nvfp4.h;
// all others have scales of E8M0.
enum class Format : uint8_t { none, e4m3, e5m2, e2m1, nvfp4 };
MANTISSA_HOST_DEVICE constexpr bool is_four_bit(Format format) { return format == Format::e2m1 || format == Format::nvfp4; }

// Rules by which a block's E8M0 scale follows from its largest magnitude. rceil: 2^ceil(log2(amax / largest element)), as Transformer
// Engine and cuBLAS; floor: 2^(floor(log2 amax) - emax), OCP v1.0; flashinfer: rceil with the flushes of that kernel, E2M1 only; even:
// floor of amax rounded to the bits of an element, half up, as compressed-tensors, Quark and torchao's EVEN; ceil: 2^(ceil(log2 amax) -
// emax), as torchao's CEIL; mse: of floor's scale, half of it and twice it, the one whose elements have the least squared error, of equal
// ones the smallest. nearest: the scale of NVFP4 nearest to amax / largest element, nvfp4 only, which
// has this rule and mse: of the scales from one code below that one to five above it, as far as the largest element is a 4 or a 6, the one
// whose elements have the least squared error, of equal ones the smallest.
enum class ScaleRule : uint8_t { rceil, floor, flashinfer, even, ceil, mse, nearest };

// Rule by which codes of a block follow from its elements. tensor_exponent: the scale of the tensor is 2^tensor_exponent; 0 but for NVFP4.
struct CodeRule {
  ScaleRule scale;
  int8_t tensor_exponent = 0;

  MANTISSA_HOST_DEVICE constexpr CodeRule(ScaleRule rule, int8_t exponent = 0)
      : scale(rule), tensor_exponent(exponent) {}  // NOLINT: most formats have a rule alone
};

// Range to which the scale codes of numbers are clamped. `least` is at most 127 and `most` at least that. A finite element divided by
// 2^(most - 127) is then finite, too: encoding in 16-bit lanes and by multiplication rests on it.
struct ScaleRange {
  uint8_t least = 0, most = 254;

  bool operator==(const ScaleRange& other) const = default;
};

}  // namespace mantissa
