#include "job/handshake.h"

#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/base/file.h"

namespace mantissa {
namespace {

constexpr std::string_view kMagic = "MTSA";
constexpr size_t kNonceAt = 20;

void fill_random(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::getrandom(out.data(), out.size(), 0);
    require(got >= 0 || errno == EINTR, ExitCode::environment, "the system gives no random bytes: ", system_message(errno));
    out = out.subspan(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  }
}

}  // namespace

HelloBytes new_hello(const Hello& hello) {
  HelloBytes out{};
  std::memcpy(out.data(), kMagic.data(), kMagic.size());
  std::memcpy(&out[4], &hello.protocol, sizeof hello.protocol);
  std::memcpy(&out[8], &hello.attempt, sizeof hello.attempt);
  std::memcpy(&out[12], &hello.rank, sizeof hello.rank);
  std::memcpy(&out[16], &hello.world, sizeof hello.world);
  fill_random(std::span(out).subspan(kNonceAt));
  return out;
}

bool is_hello(const HelloBytes& bytes) { return std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0; }

Hello parse_hello(const HelloBytes& bytes) {
  Hello out;
  std::memcpy(&out.protocol, &bytes[4], sizeof out.protocol);
  std::memcpy(&out.attempt, &bytes[8], sizeof out.attempt);
  std::memcpy(&out.rank, &bytes[12], sizeof out.rank);
  std::memcpy(&out.world, &bytes[16], sizeof out.world);
  return out;
}

Mac mac_of(MacSender sender, std::string_view secret, const HelloBytes& of_rank, const HelloBytes& of_root, std::string_view job) {
  std::vector<std::byte> message;
  const auto add = [&](std::span<const std::byte> bytes) { message.insert(message.end(), bytes.begin(), bytes.end()); };
  add(std::as_bytes(std::span(std::string_view(sender == MacSender::rank ? "rank" : "root"))));
  add(of_rank);
  add(of_root);
  add(std::as_bytes(std::span(job)));
  return hmac_sha256(secret, message);
}

Mac hmac_sha256(std::string_view key, std::span<const std::byte> message) {
  Mac out{};
  unsigned length = 0;
  const unsigned char* const made =
      ::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(message.data()),
             message.size(), reinterpret_cast<unsigned char*>(out.data()), &length);
  require(made != nullptr && length == out.size(), "libcrypto gave no HMAC-SHA256");
  return out;
}

bool same_mac(std::span<const std::byte> a, const Mac& b) {
  return a.size() == b.size() && ::CRYPTO_memcmp(a.data(), b.data(), b.size()) == 0;
}

std::string random_hex(size_t bytes) {
  std::vector<std::byte> random(bytes);
  fill_random(random);
  std::string out;
  for (const std::byte byte : random) {
    for (const int digit : {std::to_integer<int>(byte >> 4), std::to_integer<int>(byte & std::byte{15})}) out += "0123456789abcdef"[digit];
  }
  return out;
}

}  // namespace mantissa
