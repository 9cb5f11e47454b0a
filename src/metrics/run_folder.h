// The folder of a run, runs/<name>/: config.json (resolved), config-origins.json (the same, each value followed by a comment that names its
// origin), run.json, metrics.jsonl, TensorBoard events, log.txt; the checkpoints lie in checkpoint.dir, by default inside.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/config/run_config.h"
#include "mantissa/metrics/events.h"

namespace mantissa {

// Appends records to a log. A record is in the file on return, written by one system call unless that is cut short: only then can a kill
// leave a part of it; what a full disk or a limit on file sizes cuts short is undone. Failures must not stop training: they are counted,
// not thrown, and the next record is tried again.
class AppendFile {
 public:
  // Creates the file or continues it. Throws Error(environment) if it cannot be opened.
  explicit AppendFile(const std::filesystem::path& path);
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&& other) noexcept;
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;
  ~AppendFile();

  void append(std::string_view record);
  // Removes what follows the last line end: the rest of a line that a power cut tore.
  void cut_torn_line();

  int64_t failures() const { return failures_; }  // records that were dropped
  const std::filesystem::path& path() const { return path_; }

 private:
  int fd_ = -1;
  int64_t size_ = 0;  // end of the last whole record
  int64_t failures_ = 0;
  std::filesystem::path path_;
};

// TensorBoard event files with scalars and histograms.
//
//   file    events.out.tfevents.SECONDS.HOST.PID.NUMBER; a sequence of records, the first of which holds file_version "brain.Event:2"
//   record  u64 length | u32 masked_crc32c(the 8 bytes of length) | data | u32 masked_crc32c(data); little-endian
//   data    protobuf Event {1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary {1: repeated Value {1: string tag, 2:
//   float | 5: HistogramProto {1: double min, 2: max, 3: num, 4: sum, 5: sum of squares, 6: upper ends of buckets, 7: their counts}}}}
//
// crc32c: Castagnoli polynomial, reflected 0x82f63b78, as in RFC 3720 B.4. mask(c) = ((c >> 15) | (c << 17)) + 0xa282ead8 mod 2^32.

struct TaggedValue {
  std::string_view tag;  // "train/loss"
  float value = 0;       // NaN and Inf are allowed
};

class EventFile {
 public:
  // Starts a new file in the folder; TensorBoard reads all files of a folder as one run. Throws Error(environment) if that fails.
  EventFile(const std::filesystem::path& folder, double wall_time);

  // wall_time: seconds since 1970. All scalars are in the file on return.
  void write(int64_t step, double wall_time, std::span<const TaggedValue> scalars);

  // Writes how often each whole number occurs, in a bucket for each from the least to the greatest. `counts` must not be empty.
  void write_histogram(int64_t step, double wall_time, std::string_view tag, const std::map<int, int64_t>& counts);

  int64_t failures() const { return file_.failures(); }  // records dropped, e.g. because the disk is full
  const std::filesystem::path& path() const { return file_.path(); }

 private:
  AppendFile file_;
};

// Make the parts of the format.
uint32_t crc32c(std::string_view bytes);
uint32_t masked_crc32c(std::string_view bytes);
std::string event_record(std::string_view data);
std::string version_event(double wall_time);
std::string scalar_event(int64_t step, double wall_time, std::span<const TaggedValue> scalars);
std::string histogram_event(int64_t step, double wall_time, std::string_view tag, const std::map<int, int64_t>& counts);

// Throw Error(usage) if the folder holds checkpoints of an earlier run; the second, too, if it holds metrics of its steps. They change
// nothing.
void require_no_checkpoints(const LoadedConfig& loaded);
void require_unused_folder(const LoadedConfig& loaded);

// Throws Error(environment) if another process trains there.
void require_nobody_trains(const RunConfig& config);

// Makes the folder and writes config.json, config-origins.json and run.json. `arguments` is the command line, for run.json.
// Throws Error(environment) if that is not possible, Error(usage) if the path cannot be a folder.
void write_run_folder(const LoadedConfig& loaded, const std::vector<std::string>& arguments);

// Writes metrics.jsonl and the event file. A full disk drops lines and counts them; training goes on.
class Metrics {
 public:
  explicit Metrics(const LoggingConfig& config);
  void write(const StartEvent& event);
  void write(const StepEvent& event);
  void write(const EvaluationEvent& event);
  void write(const SampleEvent& event);
  void write(const SaveEvent& event);
  void write(const ExportEvent& event);
  void write(const PrecisionEvent& event);
  void write(const StragglerEvent& event);
  int64_t dropped() const;

 private:
  std::optional<AppendFile> lines_;  // one JSON object each
  std::optional<EventFile> events_;
};

}  // namespace mantissa
