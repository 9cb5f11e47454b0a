#include "mantissa/io/hash.h"

#include <xxhash.h>

#include <algorithm>
#include <new>
#include <utility>

#include "mantissa/base/error.h"

namespace mantissa {

uint64_t xxh64(std::span<const std::byte> bytes) { return XXH64(bytes.data(), bytes.size(), 0); }
uint64_t xxh64(std::string_view bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

std::string hex64(uint64_t value) {
  std::string digits(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) digits[i] = "0123456789abcdef"[value & 15];
  return digits;
}

std::optional<uint64_t> parse_hex64(std::string_view digits) {
  if (digits.size() != 16) return std::nullopt;
  uint64_t value = 0;
  for (const char c : digits) {
    const bool decimal = c >= '0' && c <= '9';
    if (!decimal && !(c >= 'a' && c <= 'f')) return std::nullopt;
    value = value << 4 | static_cast<uint64_t>(decimal ? c - '0' : c - 'a' + 10);
  }
  return value;
}

ChunkHasher::ChunkHasher(int64_t chunk_bytes) : state_(XXH64_createState()), chunk_bytes_(static_cast<size_t>(chunk_bytes)) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH64_reset(state_, 0);
}

ChunkHasher::~ChunkHasher() { XXH64_freeState(state_); }

void ChunkHasher::end_chunk() {
  hashes_.push_back(XXH64_digest(state_));
  XXH64_reset(state_, 0);
  filled_ = 0;
}

void ChunkHasher::update(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t take = std::min(bytes.size(), chunk_bytes_ - filled_);
    XXH64_update(state_, bytes.data(), take);
    filled_ += take;
    bytes = bytes.subspan(take);
    if (filled_ == chunk_bytes_) end_chunk();
  }
}

std::vector<uint64_t> ChunkHasher::finish() {
  if (filled_ > 0) end_chunk();
  return std::exchange(hashes_, {});
}

}  // namespace mantissa
