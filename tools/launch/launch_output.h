// Prints what the workers of `mantissa launch` write: line by line behind "[rank3]:", and unchanged into files.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "mantissa/base/hash.h"
#include "mantissa/base/unblocked_output.h"

namespace mantissa::tools {

// Remembers the errors that were shown: the hash of each beginning of one, and behind whose prefix.
using ShownErrors = std::map<uint64_t, std::string>;

// One stream of one worker. Lines longer than 64 KiB are cut, so that memory stays bounded.
class WorkerStream {
 public:
  // `from` is the reading end of a pipe and becomes this object's. Lines are shown on `to`, if there is one; `log` is a file, or "". An
  // error, a line that begins with "error: " and the following ones with two spaces, is not shown again if another stream of `errors` has
  // shown it.
  WorkerStream(int from, UnblockedOutput* to, std::string prefix, const std::string& log, ShownErrors& errors);
  WorkerStream(WorkerStream&& other) noexcept;
  WorkerStream(const WorkerStream&) = delete;
  WorkerStream& operator=(const WorkerStream&) = delete;
  ~WorkerStream();

  // Returns -1 while earlier lines wait for a reader; the worker waits as long.
  int fd() const { return to_ != nullptr && to_->waiting() ? -1 : from_; }
  bool open() const { return from_ >= 0; }
  void read();       // reads all that is there; closes at the end
  void note_rest();  // notes the bytes that are in the pipe now: until they have been read, has_rest()
  bool has_rest() const { return rest_ > 0; }
  void close();                                    // shows what has no line end yet; with a rest, that is lost
  bool repeats() const { return !held_.empty(); }  // its last error was that of another
  int log_error() const { return log_error_; }     // errno of the first write to the log that failed; 0: none has

 private:
  void write_log(std::string_view bytes);
  void show(bool all);
  std::string shown(const std::string& line);

  int from_;
  int64_t rest_ = 0;  // bytes
  UnblockedOutput* to_;
  int log_, log_error_ = 0;
  std::string prefix_, pending_;
  ShownErrors* errors_;
  std::optional<Hash64> error_;  // hash of the error that goes on, so far
  std::string held_;             // the part of it that is held back
};

}  // namespace mantissa::tools
