// What the workers of `mantissa launch` print: line by line behind "[rank3]:", and as it is into files.
#pragma once

#include <string>

namespace mantissa::tools {

// One stream of one worker. Lines longer than 64 KiB are cut, so that memory stays bounded.
class WorkerStream {
 public:
  // `from` is the reading end of a pipe and becomes this object's. Shown on descriptor `to`, unless that is -1; `log` is a file, or "".
  WorkerStream(int from, int to, std::string prefix, const std::string& log);
  WorkerStream(WorkerStream&& other) noexcept;
  WorkerStream(const WorkerStream&) = delete;
  WorkerStream& operator=(const WorkerStream&) = delete;
  ~WorkerStream();

  int fd() const { return from_; }
  bool open() const { return from_ >= 0; }
  void read();   // what is there; closes at the end
  void close();  // shows what has no line end yet

 private:
  void show(bool all);

  int from_, to_, log_;
  std::string prefix_, pending_;
};

}  // namespace mantissa::tools
