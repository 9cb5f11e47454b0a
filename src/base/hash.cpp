#include "base/hash.h"

#include <xxhash.h>

#include <new>

namespace mantissa {

std::string Hash64::text() const {
  std::string digits(16, '0');
  uint64_t rest = value;
  for (size_t i = 16; i-- > 0; rest >>= 4) digits[i] = "0123456789abcdef"[rest & 15];
  return digits;
}

std::optional<Hash64> Hash64::parse(std::string_view digits) {
  if (digits.size() != 16) return std::nullopt;
  uint64_t value = 0;
  for (const char c : digits) {
    const bool decimal = c >= '0' && c <= '9';
    if (!decimal && !(c >= 'a' && c <= 'f')) return std::nullopt;
    value = value << 4 | static_cast<uint64_t>(decimal ? c - '0' : c - 'a' + 10);
  }
  return Hash64{value};
}

Hash64 xxh64(std::span<const std::byte> bytes, uint64_t seed) { return {XXH64(bytes.data(), bytes.size(), seed)}; }
Hash64 xxh64(std::string_view bytes) { return xxh64(std::as_bytes(std::span(bytes))); }

StreamHash::StreamHash() : state_(XXH64_createState(), [](XXH64_state_s* state) { XXH64_freeState(state); }) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH64_reset(state_.get(), 0);
}

void StreamHash::update(std::span<const std::byte> bytes) { XXH64_update(state_.get(), bytes.data(), bytes.size()); }

Hash64 StreamHash::finish() {
  const Hash64 hash{XXH64_digest(state_.get())};
  XXH64_reset(state_.get(), 0);
  return hash;
}

Hash64 xxh64(int64_t bytes, const std::function<void(int64_t, std::span<std::byte>)>& read) {
  constexpr int64_t kPiece = 2 << 20;
  StreamHash hash;
  std::vector<std::byte> piece;
  for (int64_t at = 0; at < bytes; at += kPiece) {
    piece.resize(static_cast<size_t>(std::min(kPiece, bytes - at)));
    read(at, piece);
    hash.update(piece);
  }
  return hash.finish();
}

}  // namespace mantissa
