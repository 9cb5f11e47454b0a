// TensorBoard event files with scalars and histograms.
//
//   file    events.out.tfevents.SECONDS.HOST.PID.NUMBER; a sequence of records, the first of which holds file_version "brain.Event:2"
//   record  u64 length | u32 masked_crc32c(the 8 bytes of length) | data | u32 masked_crc32c(data); little-endian
//   data    protobuf Event {1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary {1: repeated Value {1: string tag, 2:
//   float | 5: HistogramProto {1: double min, 2: max, 3: num, 4: sum, 5: sum of squares, 6: upper ends of buckets, 7: their counts}}}}
//
// crc32c: Castagnoli polynomial, reflected 0x82f63b78, as in RFC 3720 B.4. mask(c) = ((c >> 15) | (c << 17)) + 0xa282ead8 mod 2^32.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "mantissa/metrics/append_file.h"

namespace mantissa {

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

}  // namespace mantissa
