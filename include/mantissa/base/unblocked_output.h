// Writes to a descriptor whose reader may not read: a pipe that nobody empties, a terminal that was stopped. Writing never waits for the
// reader; unread output is kept up to a limit, and then dropped and counted.
#pragma once

#include <chrono>
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

  // Writes whole lines. They are dropped if the reader is gone, the disk is full, a MiB of earlier lines waits, or after give_up(); never
  // for their size, if nothing waits.
  void write(std::string_view lines);
  void flush();    // writes what goes at once
  void finish();   // writes all of it, as long as the reader takes some every two seconds; the rest is dropped
  void give_up();  // drops what waits, and all lines from now on
  bool waiting() const { return !waiting_.empty(); }
  double seconds_waiting() const;                    // since the reader last took some, if something waits; else 0
  int fd() const { return own_ >= 0 ? own_ : fd_; }  // to poll for POLLOUT while something waits
  int64_t dropped_lines() const { return dropped_; }
  int error() const { return error_; }  // errno of the latest write that failed; 0: none has

 private:
  using Clock = std::chrono::steady_clock;

  void drop();

  int fd_, own_ = -1;
  std::string waiting_;
  Clock::time_point taken_at_;  // or when what waits began to wait
  int64_t dropped_ = 0;
  int error_ = 0;
  bool given_up_ = false;
};

}  // namespace mantissa
