// Computes cyclic redundancy checks of 32 bits, bits reflected, all ones before and inverted after: CRC-32 of zlib and CRC-32C of iSCSI
// differ in their polynomial only.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace mantissa {

constexpr uint32_t kZlibPolynomial = 0xEDB88320U, kCastagnoliPolynomial = 0x82F63B78U;

template <uint32_t kPolynomial>
uint32_t reflected_crc(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0U);
      table[i] = crc;
    }
    return table;
  }();
  uint32_t crc = ~0U;
  for (const char c : bytes) crc = crc >> 8 ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

}  // namespace mantissa
