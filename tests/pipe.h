// A pipe that a test reads, without waiting, and fills.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "mantissa/base/error.h"

namespace mantissa::test {

class Pipe {
 public:
  Pipe() {
    require(::pipe2(ends_.data(), O_CLOEXEC) == 0, "no pipe");
    require(::fcntl(ends_[0], F_SETFL, O_NONBLOCK) == 0, "a pipe that blocks");
  }
  ~Pipe() {
    close_reading();
    close_writing();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  int writing() const { return ends_[1]; }
  int64_t room() const { return ::fcntl(ends_[1], F_GETPIPE_SZ); }
  void close_reading() { close(ends_[0]); }
  void close_writing() { close(ends_[1]); }
  int release_reading() { return std::exchange(ends_[0], -1); }  // for an owner of its own

  // Writes, and waits for room.
  void write(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t written = ::write(ends_[1], bytes.data(), bytes.size());
      require(written > 0, "a pipe takes nothing");
      bytes.remove_prefix(static_cast<size_t>(written));
    }
  }
  // Returns what is there now.
  std::string read_all() const {
    std::array<char, 65536> block;
    std::string out;
    for (ssize_t got = 0; (got = ::read(ends_[0], block.data(), block.size())) > 0;) out.append(block.data(), static_cast<size_t>(got));
    return out;
  }

 private:
  static void close(int& end) {
    if (end >= 0) ::close(std::exchange(end, -1));
  }

  std::array<int, 2> ends_{-1, -1};
};

}  // namespace mantissa::test
