// Draws the progress line of a command that reads large files: the share that it has read, and the time left. It appears after two seconds,
// where Console draws one, too.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/checkpoint_reader.h"
#include "mantissa/config/run_config.h"

namespace mantissa::tools {

class ReadProgress {
 public:
  // bytes: what the command will read while this lives, as far as known.
  explicit ReadProgress(int64_t bytes);
  ReadProgress(const ReadProgress&) = delete;
  ReadProgress& operator=(const ReadProgress&) = delete;

 private:
  std::jthread drawing_;  // joins; not started where nothing is drawn
};

// Returns body(), which runs under a progress line.
template <class Body>
auto with_read_progress(int64_t bytes, const Body& body) {
  const ReadProgress progress(bytes);
  return body();
}

// The progress of a command that counts what it does. On a terminal it is drawn as above; elsewhere it is a line on standard error now and
// then, "eval: 25% | 12s left", so that the reader of a log or a pipe sees that it goes on.
struct ProgressWaits {  // seconds before a line
  double first = 10.0, next = 30.0;
};
class CountProgress {
 public:
  CountProgress(std::string name, int64_t count, const ProgressWaits& waits = {});  // count 0: says nothing
  ~CountProgress();                                                                 // takes away what is drawn
  CountProgress(const CountProgress&) = delete;
  CountProgress& operator=(const CountProgress&) = delete;
  void begin_next();  // counts those begun before as done

 private:
  std::string name_;
  int64_t count_, done_ = -1;
  ProgressWaits waits_;
  bool draws_, drawn_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double next_;  // when something is said, in seconds from the start
};

// Returns "[######..................] 25% | 12s left", of so many bytes after so many seconds.
std::string read_progress_line(int64_t done, int64_t bytes, double seconds);

// Returns the bytes that this process has read so far; none if the system does not tell.
std::optional<int64_t> bytes_read();

// Return the bytes that commands read: of a checkpoint and its weights, of a folder of Hugging Face's form, of text files.
int64_t bytes_to_verify(const CheckpointReader& reader);
int64_t bytes_to_export(const std::filesystem::path& from, const ExportOptions& options = {},
                        const std::vector<std::string>& precision = {});
int64_t bytes_to_compare(const std::filesystem::path& folder, const std::filesystem::path& against);
int64_t bytes_of_weights(const std::filesystem::path& model);  // a checkpoint or a folder
int64_t bytes_of_folder(const std::filesystem::path& folder);
int64_t bytes_to_tokenize(const std::vector<std::string>& paths, bool collects_characters);

}  // namespace mantissa::tools
