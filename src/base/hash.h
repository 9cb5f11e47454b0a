// xxh64, with seed 0 by default: it finds damage, not forgery. In texts it is 16 lower-case hex digits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>

struct XXH64_state_s;  // declared in xxhash.h

namespace mantissa {

struct Hash64 {
  static constexpr const char* kTextForm = "16 hex digits";
  uint64_t value = 0;

  std::string text() const;
  static std::optional<Hash64> parse(std::string_view digits);  // nullopt for anything but the 16 digits
  bool operator==(const Hash64&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, Hash64 hash) { return out << hash.text(); }

Hash64 xxh64(std::span<const std::byte> bytes, uint64_t seed = 0);
Hash64 xxh64(std::string_view bytes);

// Hashes a stream that arrives in parts.
class StreamHash {
 public:
  StreamHash();
  void update(std::span<const std::byte> bytes);
  Hash64 finish();  // update() then begins another stream

 private:
  std::unique_ptr<XXH64_state_s, void (*)(XXH64_state_s*)> state_;
};

// Hashes so many bytes, which read(offset, piece) fetches a piece of some megabytes at a time.
Hash64 xxh64(int64_t bytes, const std::function<void(int64_t, std::span<std::byte>)>& read);

// Computes cyclic redundancy checks of 32 bits, bits reflected, all ones before and inverted after: CRC-32 of zlib and CRC-32C of iSCSI
// differ in their polynomial only.

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
