// Authenticates both ends of a connection: each proves that it knows the job's secret before the other uses any of its bytes.
//
//   rank r -> rank 0   hello, 32 bytes
//   rank 0 -> rank r   hello, 32 bytes
//   rank r -> rank 0   HMAC-SHA256(secret, "rank" | hello of r | hello of 0 | job), 32 bytes
//   rank 0 -> rank r   HMAC-SHA256(secret, "root" | hello of r | hello of 0 | job), 32 bytes
//
//   hello  0  4  "MTSA"
//          4  2  protocol version      all numbers little-endian
//          6  2  0
//          8  4  attempt: restarts before this one
//         12  4  rank
//         16  4  world size
//         20 12  nonce from the system
//
// An unauthenticated connection is dropped after 5 s or 64 bytes. The numbers of a hello are read only after its MAC was verified.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace mantissa {

inline constexpr uint16_t kStoreProtocol = 2;
inline constexpr size_t kMacBytes = 32;
inline constexpr double kHandshakeSeconds = 5;

using Mac = std::array<std::byte, kMacBytes>;
using HelloBytes = std::array<std::byte, 32>;

struct Hello {
  uint16_t protocol = kStoreProtocol;
  uint32_t attempt = 0, rank = 0, world = 0;
};

HelloBytes new_hello(const Hello& hello);  // with a nonce of its own
bool is_hello(const HelloBytes& bytes);
Hello parse_hello(const HelloBytes& bytes);

enum class MacSender { rank, root };
Mac mac_of(MacSender sender, std::string_view secret, const HelloBytes& of_rank, const HelloBytes& of_root, std::string_view job);

Mac hmac_sha256(std::string_view key, std::span<const std::byte> message);
// Compares in a time that does not depend on where they differ.
bool same_mac(std::span<const std::byte> a, const Mac& b);

// Returns `bytes` random bytes as hex digits.
std::string random_hex(size_t bytes);

}  // namespace mantissa
