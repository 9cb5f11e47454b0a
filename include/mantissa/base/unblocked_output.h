// Writes to a descriptor whose reader may not read: a pipe that nobody empties, a terminal that was stopped. Writing never waits for the
// reader; unread output is kept up to a limit, and then dropped and counted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace mantissa {

class UnblockedOutput {
 public:
  explicit UnblockedOutput(int fd);
  ~UnblockedOutput();  // finish()
  UnblockedOutput(const UnblockedOutput&) = delete;
  UnblockedOutput& operator=(const UnblockedOutput&) = delete;

  // Writes whole lines. Returns false if they were dropped: the reader is gone, the disk is full, or a MiB of earlier lines waits.
  bool write(std::string_view lines);
  void flush();   // as much of what waits as goes at once
  void finish();  // all of it, as long as the reader takes some every two seconds; the rest is dropped
  bool waiting() const { return !waiting_.empty(); }
  int fd() const { return own_ >= 0 ? own_ : fd_; }  // to poll for POLLOUT while something waits
  int64_t dropped_lines() const { return dropped_; }

 private:
  void drop();

  int fd_, own_ = -1;
  std::string waiting_;
  int64_t dropped_ = 0;
};

}  // namespace mantissa
