// xxh64 (seed 0): finds damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

struct XXH64_state_s;  // of xxhash.h

namespace mantissa {

uint64_t xxh64(std::span<const std::byte> bytes);
uint64_t xxh64(std::string_view bytes);

// 16 lower-case hex digits, and back; nullopt for anything else.
std::string hex64(uint64_t value);
std::optional<uint64_t> parse_hex64(std::string_view digits);

// The xxh64 of every chunk_bytes of a stream that arrives in parts; the last chunk may be short.
class ChunkHasher {
 public:
  explicit ChunkHasher(int64_t chunk_bytes);
  ~ChunkHasher();
  ChunkHasher(const ChunkHasher&) = delete;
  ChunkHasher& operator=(const ChunkHasher&) = delete;

  void update(std::span<const std::byte> bytes);
  std::vector<uint64_t> finish();

 private:
  void end_chunk();

  XXH64_state_s* state_;
  size_t chunk_bytes_;
  size_t filled_ = 0;
  std::vector<uint64_t> hashes_;
};

}  // namespace mantissa
