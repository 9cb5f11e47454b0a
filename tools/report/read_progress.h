// Draws the progress line of a command that reads large files: the share that it has read, and the time left. It appears after two seconds,
// where Console draws one, too.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "mantissa/checkpoint/checkpoint_reader.h"
#include "mantissa/config/export_options.h"

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

// What body() returns, with a progress line over it.
template <class Body>
auto with_read_progress(int64_t bytes, const Body& body) {
  const ReadProgress progress(bytes);
  return body();
}

// "[######..................] 25% | 12s left", of so many bytes after so many seconds.
std::string read_progress_line(int64_t done, int64_t bytes, double seconds);

// Returns the bytes that this process has read so far; none if the system does not tell.
std::optional<int64_t> bytes_read();

// Return the bytes that commands read: of a checkpoint and its weights, of a folder of Hugging Face's form, of text files.
int64_t bytes_to_verify(const CheckpointReader& reader);
int64_t bytes_to_export(const std::filesystem::path& from, const ExportOptions& options = {});
int64_t bytes_to_compare(const std::filesystem::path& folder, const std::filesystem::path& against);
int64_t bytes_of_folder(const std::filesystem::path& folder);
int64_t bytes_to_tokenize(const std::vector<std::string>& paths, bool collects_characters);

}  // namespace mantissa::tools
