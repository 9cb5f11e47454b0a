// Memory layout of codes and scales: two E2M1 codes to a byte, and the 128x4 layout of scales that cuBLASLt and tcgen05 read.
#pragma once

#include <cstdint>

#include "mantissa/base/host_device.h"

namespace mantissa {

// Even columns of a row are in the low nibble.
MANTISSA_HOST_DEVICE inline uint8_t pack_nibbles(uint8_t even, uint8_t odd) { return static_cast<uint8_t>((odd << 4) | (even & 15)); }
MANTISSA_HOST_DEVICE inline uint8_t unpack_nibble(uint8_t byte, int64_t column) {
  return static_cast<uint8_t>((column & 1) != 0 ? byte >> 4 : byte & 15);
}

// `outer` indexes the dimension that is not contracted, `inner` the blocks along the contraction, of which there are `inner_count`.
// Rowwise scales [R, C/32]: outer = row, inner = column / 32. Columnwise [R/32, C]: outer = column, inner = row / 32.
MANTISSA_HOST_DEVICE inline int64_t swizzled_offset(int64_t outer, int64_t inner, int64_t inner_count) {
  return ((outer / 128) * ((inner_count + 3) / 4) + inner / 4) * 512 + (outer % 32) * 16 + ((outer % 128) / 32) * 4 + inner % 4;
}

// Every byte that holds no scale is 0.
MANTISSA_HOST_DEVICE inline int64_t swizzled_bytes(int64_t outer_count, int64_t inner_count) {
  return ((outer_count + 127) / 128) * ((inner_count + 3) / 4) * 512;
}

}  // namespace mantissa
