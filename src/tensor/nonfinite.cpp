#include "mantissa/tensor/nonfinite.h"

#include <algorithm>
#include <cstring>

namespace mantissa {
namespace {

// Index of the first value whose exponent bits are all ones, or -1. The maximum over a block of absolute bits vectorizes.
template <class Bits>
int64_t first_of_bits(std::span<const std::byte> bytes, Bits magnitude, Bits infinity) {
  constexpr size_t kBlock = 4096;
  Bits values[kBlock];
  for (size_t begin = 0; begin < bytes.size(); begin += sizeof values) {
    const size_t count = std::min(sizeof values, bytes.size() - begin) / sizeof(Bits);
    std::memcpy(values, bytes.data() + begin, count * sizeof(Bits));
    Bits most = 0;
    for (size_t i = 0; i < count; ++i) most = std::max(most, static_cast<Bits>(values[i] & magnitude));
    if (most < infinity) continue;
    const auto bad = std::find_if(values, values + count, [&](Bits v) { return static_cast<Bits>(v & magnitude) >= infinity; });
    return static_cast<int64_t>(begin / sizeof(Bits)) + (bad - values);
  }
  return -1;
}

}  // namespace

int64_t first_nonfinite(Dtype dtype, std::span<const std::byte> values) {
  switch (dtype) {
    case Dtype::f32: return first_of_bits<uint32_t>(values, 0x7fffffff, 0x7f800000);
    case Dtype::bf16: return first_of_bits<uint16_t>(values, 0x7fff, 0x7f80);
    case Dtype::f64: return first_of_bits<uint64_t>(values, 0x7fffffffffffffff, 0x7ff0000000000000);
    case Dtype::i32:
    case Dtype::u8: return -1;
  }
  return -1;
}

}  // namespace mantissa
