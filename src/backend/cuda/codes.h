// The codes of a matrix, read element by element. A matrix has fewer than 2^32 rows and columns: a chip divides 32 bits in a few
// instructions, 64 in a hundred.
#pragma once

#include "backend/cuda/packs.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/formats/with_element.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa::gpu {

struct CodeMatrix {
  const uint8_t *codes = nullptr, *scales = nullptr;
  int64_t cols = 0, blocks_across = 0;
  uint32_t block_rows = 1, block_cols = 1;
  ScaleRule rule = ScaleRule::rceil;

  CodeMatrix() = default;
  explicit CodeMatrix(const QuantizedTensor& tensor)
      : codes(tensor.codes.device_data<uint8_t>()),
        scales(tensor.scales.device_data<uint8_t>()),
        cols(tensor.shape[1]),
        blocks_across(tensor.scales.dim(1)),
        block_rows(static_cast<uint32_t>(tensor.how.block_rows)),
        block_cols(static_cast<uint32_t>(tensor.how.block_cols)),
        rule(tensor.how.rule) {}
  __device__ uint8_t scale(int64_t row, int64_t col) const {
    return scales[static_cast<uint32_t>(row) / block_rows * blocks_across + static_cast<uint32_t>(col) / block_cols];
  }
};

// One of elements E.
template <class E>
struct CodesToRead : CodeMatrix {
  using CodeMatrix::CodeMatrix;
  __device__ explicit CodesToRead(const CodeMatrix& matrix) : CodeMatrix(matrix) {}
  __device__ uint8_t code(int64_t row, int64_t col) const {
    const uint8_t byte = codes[(row * cols + col) / E::codes_per_byte];
    return E::codes_per_byte == 1 ? byte : unpack_nibble(byte, col);
  }
  // The fp32 bits that a code stands for.
  __device__ uint32_t bits(int64_t row, int64_t col) const { return decode_in_block<E>(code(row, col), scale(row, col), rule); }
};

// Its rows, eight elements at a time where they are whole.
template <class E>
struct CodePacks : CodesToRead<E> {
  static constexpr unsigned kBytes = kPack / E::codes_per_byte;
  using Bytes = std::conditional_t<kBytes == 8, uint64_t, uint32_t>;
  bool whole;  // rows and blocks are whole packs, and codes begin at a multiple of their bytes

  explicit CodePacks(const QuantizedTensor& tensor)
      : CodesToRead<E>(tensor),
        whole(tensor.shape[1] % kPack == 0 && tensor.how.block_cols % kPack == 0 &&
              reinterpret_cast<uintptr_t>(tensor.codes.device_data<uint8_t>()) % kBytes == 0) {}

  // Zeros behind column `end`. extreme: whether an element that is not zero has an extreme scale.
  __device__ Pack read(int64_t row, int64_t col, int64_t end, bool& extreme) const {
    Pack out;
    const bool all = whole && col % kPack == 0 && col + kPack <= end;
    const Bytes bytes = all ? load<Bytes>(this->codes + (row * this->cols + col) / E::codes_per_byte) : Bytes{0};
    const uint8_t shared_scale = all ? this->scale(row, col) : uint8_t{0};
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const bool there = all || col + i < end;
      const uint8_t code = all     ? static_cast<uint8_t>(bytes >> (8 / E::codes_per_byte * i) & (0xffU >> (8 - 8 / E::codes_per_byte)))
                           : there ? this->code(row, col + i)
                                   : uint8_t{0};
      const uint8_t scale = all || !there ? shared_scale : this->scale(row, col + i);
      extreme = extreme || (there && (code & E::magnitude_mask) != 0 && extreme_scale<E>(scale));
      out.at[i] = there ? __builtin_bit_cast(float, decode_in_block<E>(code, scale, this->rule)) : 0.0F;
    }
    return out;
  }
};

// The codes of eight elements that lie together, as an encoder gives them: one byte each, or two in a byte.
template <class E>
struct PackOfCodes {
  typename CodePacks<E>::Bytes bytes = 0;
  __device__ void put(unsigned i, uint8_t code) { bytes |= typename CodePacks<E>::Bytes{code} << (8 / E::codes_per_byte * i); }
};

}  // namespace mantissa::gpu
