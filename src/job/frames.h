// Defines the frames on a connection of the store, after both ends have authenticated.
//
//   frame  0  4  bytes that follow, at most kMostFrameBytes (little-endian, as all numbers)
//          4  1  Message
//          5     its fields: numbers as they are, texts after their length in 4 bytes
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/progress.h"
#include "job/store.h"
#include "mantissa/base/error.h"

namespace mantissa {

enum class Message : uint8_t {
  welcome = 1,  // root: this rank is in
  refused,      // root: u8 code, u8 may it try again, reason
  join,         // host, u32 local rank, u32 local size
  set,          // key, value
  get,          // u32 request, key
  barrier,      // u32 request, f64 seconds, name
  reply,        // root: u32 request, value
  heartbeat,    // i64 step, u32 sequence, u32 operation, section; of root: nothing
  abort,        // u8 code, u8 stuck, message; of root: u8 code, u8 stuck, i32 rank, message
  leave,
};

constexpr size_t kMostFrameBytes = (size_t{1} << 20) + 4096;

// Owns a descriptor.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Disables delays, ends connections that acknowledge nothing for so long, and makes calls non-blocking.
void configure(const Socket& socket, double timeout_s);

class Fields {
 public:
  template <class T>
  Fields& number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Fields& text(std::string_view value) {
    number(static_cast<uint32_t>(value.size()));
    bytes_.append(value);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// A received frame. Reading beyond its end throws Error(peer_lost).
class Frame {
 public:
  Frame(Message message, std::string fields) : message_(message), fields_(std::move(fields)) {}
  Message message() const { return message_; }
  template <class T>
  T number() {
    T value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string text() { return std::string(take(number<uint32_t>())); }

 private:
  std::string_view take(size_t bytes);

  Message message_;
  std::string fields_;
  size_t at_ = 0;
};

// Sends and receives frames over a socket without waiting. One thread reads; the caller guards writing.
class Connection {
 public:
  explicit Connection(Socket socket) : socket_(std::move(socket)), heard_(monotonic_now()) {}
  int fd() const { return socket_.fd(); }
  double heard() const { return heard_; }  // when something came last

  bool receive();               // false: closed
  std::optional<Frame> next();  // Error(peer_lost) for a length beyond the cap

  void send(Message message, const Fields& fields = {});
  bool flush();  // as much as goes; false: closed
  bool waiting() const { return sent_ < out_.size(); }

 private:
  Socket socket_;
  std::string in_, out_;
  size_t sent_ = 0;
  double heard_;
};

// Compares the inputs of all ranks at the start and names those that mismatch.

// Holds what one rank gave to compare().
struct RankInputs {
  std::string host;
  std::map<std::string, std::string> items;
};

std::string inputs_text(const std::vector<NamedHash>& items);
RankInputs read_inputs(const std::string& bytes);

// Describes which items mismatch on which rank; "" if all ranks gave the same.
std::string mismatching_items(const std::vector<RankInputs>& ranks);

}  // namespace mantissa
