// Matrices as architectures store them, [in, out], and as parameters are, [out, in].
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace mantissa {

// Writes the transposed matrix of `rows` x `columns` elements, whose size is what the bytes give each.
inline void transpose(std::span<const std::byte> from, int64_t rows, int64_t columns, std::span<std::byte> to) {
  const auto height = static_cast<size_t>(rows), width = static_cast<size_t>(columns), bytes = from.size() / (height * width);
  for (size_t row = 0; row < height; ++row) {
    for (size_t column = 0; column < width; ++column)
      std::memcpy(to.data() + (column * height + row) * bytes, from.data() + (row * width + column) * bytes, bytes);
  }
}

}  // namespace mantissa
