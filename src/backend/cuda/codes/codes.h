// The codes of a matrix, read element by element or in packs. A matrix has fewer than 2^32 rows and columns: a chip divides 32 bits in a
// few instructions, 64 in a hundred.
#pragma once

#include "backend/cuda/codes/scaled_codes.h"
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
  __device__ int64_t scale_index(int64_t row, int64_t col) const {
    return static_cast<uint32_t>(row) / block_rows * blocks_across + static_cast<uint32_t>(col) / block_cols;
  }
  __device__ uint8_t scale(int64_t row, int64_t col) const { return scales[scale_index(row, col)]; }
};

// A matrix of codes of elements E.
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

// The rows of such a matrix, in packs.
template <class E>
struct CodePacks : CodesToRead<E> {
  using Codes = PackOfCodes<E>;
  bool whole;  // rows are whole packs, each of one block or of eight, and begin at multiples of their bytes

  explicit CodePacks(const QuantizedTensor& tensor)
      : CodesToRead<E>(tensor),
        whole(tensor.shape[1] % kPack == 0 && (tensor.how.block_cols % kPack == 0 || tensor.how.block_cols == 1) &&
              begins_at(tensor.codes, Codes::kBytes) && begins_at(tensor.scales, kPack)) {}

  // Returns a pack of values, with zeros from column `end` on. extreme: see decoded().
  __device__ Pack read(int64_t row, int64_t col, int64_t end, bool& extreme) const {
    if (whole && col % kPack == 0 && col + kPack <= end) {
      const Codes own{load<typename Codes::Bytes>(this->codes + (row * this->cols + col) / E::codes_per_byte)};
      const uint8_t* const scale = &this->scales[this->scale_index(row, col)];
      return decoded<E>(own, this->block_cols == 1 ? PackOfScales{load<uint64_t>(scale)} : PackOfScales::all(*scale), this->rule, extreme);
    }
    Pack out;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const bool there = col + i < end;
      out.at[i] = there ? __builtin_bit_cast(float, this->bits(row, col + i)) : 0.0F;
      extreme = extreme || (there && (this->code(row, col + i) & E::magnitude_mask) != 0 && extreme_scale<E>(this->scale(row, col + i)));
    }
    return out;
  }

 private:
  static bool begins_at(const Tensor& bytes, unsigned multiple) {
    return reinterpret_cast<uintptr_t>(bytes.device_data<uint8_t>()) % multiple == 0;
  }
};

}  // namespace mantissa::gpu
