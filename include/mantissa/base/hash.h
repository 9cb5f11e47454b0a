// xxh64, with seed 0 by default: it finds damage, not forgery. In texts it is 16 lower-case hex digits.
#pragma once

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

}  // namespace mantissa
