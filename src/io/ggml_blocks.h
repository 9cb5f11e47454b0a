// Values of the tensors of GGUF files, as dequantize_row_*() of ggml-quants.c makes them: every operation in fp32, in that order, and none
// fused with the next. d and m are fp16, q the integer of an element, bytes are from the first on:
//
//   F32 F16 BF16  the value
//   Q4_0   d, 16 bytes                          d (q - 8)        byte i: elements i and, in the high nibble, i + 16
//   Q4_1   d, m, 16 bytes                       d q + m          as Q4_0
//   Q5_0   d, u32 h, 16 bytes                   d (q - 16)       as Q4_0; bit i of h is bit 4 of element i
//   Q5_1   d, m, u32 h, 16 bytes                d q + m          as Q5_0
//   Q8_0   d, 32 i8                             d q
//   MXFP4  E8M0 e, 16 bytes                     2^(e - 128) q    as Q4_0; q is twice an E2M1 value, and 0 for -0
//   Q4_K   d, m, 12 bytes, 128 bytes            d s q - m t      8 parts of 32 elements with s and t of 6 bits; 32 bytes: two parts, the
//                                                                second in the high nibbles
//   Q5_K   d, m, 12 bytes, 32 bytes, 128 bytes  d s q - m t      as Q4_K; bit p of byte i of the 32 is bit 4 of element i of part p
//   Q6_K   128 bytes, 64 bytes, 16 i8 s, d      d s (q - 32)     halves of 128 elements: byte i of 64 has the low nibbles of elements i
//                                                                and i + 64; byte i of 32 the bits 4 and 5 of i, i + 32, i + 64, i + 96;
//                                                                s is of 16 elements
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "io/gguf_file.h"

namespace mantissa {

// Converts whole blocks; out has as many elements as they.
void decode_ggml(GgmlType type, std::span<const std::byte> blocks, std::span<float> out);

// Takes blocks of MXFP4 apart: codes as packed E2M1 has them, column 2c in the low nibble of byte c, and the E8M0 bytes. Either may be
// empty: not wanted.
void split_mxfp4(std::span<const std::byte> blocks, std::span<std::byte> codes, std::span<std::byte> scales);

}  // namespace mantissa
