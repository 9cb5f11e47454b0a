// The codes of a matrix, read element by element. A matrix has fewer than 2^32 rows and columns: a chip divides 32 bits in a few
// instructions, 64 in a hundred.
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
  CodeRule rule = ScaleRule::rceil;

  CodeMatrix() = default;
  explicit CodeMatrix(const QuantizedTensor& tensor)
      : codes(tensor.codes.device_data<uint8_t>()),
        scales(tensor.scales.device_data<uint8_t>()),
        cols(tensor.shape[1]),
        blocks_across(tensor.scales.dim(1)),
        block_rows(static_cast<uint32_t>(tensor.how.block_rows)),
        block_cols(static_cast<uint32_t>(tensor.how.block_cols)),
        rule(tensor.how.code_rule()) {}
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

// Rows of so many columns at most have places of 32 bits, 16 rows below each other.
inline constexpr int64_t kMostCols = int64_t{1} << 26;

// The rows below each other that a thread has of a matrix, of which the first `count` are there.
template <class T>
struct RowsOfThread {
  T* first;
  uint32_t pitch;
  int count;

  __device__ bool has(unsigned i) const { return static_cast<int>(i) < count; }
  __device__ T* operator[](unsigned i) const { return first + i * pitch; }
};
inline bool begins_at(const void* address, uintptr_t multiple) { return reinterpret_cast<uintptr_t>(address) % multiple == 0; }

}  // namespace mantissa::gpu
