// Whether the data are still what they were: size and xxh64 of each file, kept in the checkpoint and compared on resume.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mantissa {

struct FileFingerprint {
  std::string path;
  int64_t bytes = 0;
  // xxh64 (seed 0) of the whole file below 64 MiB; of larger ones 64 chunks of 1 MiB, evenly spaced, the first and last MiB included.
  uint64_t hash = 0;
};

// At most 64 MiB are read, whatever the size: in a larger file a change of the same length between the chunks goes unnoticed.
FileFingerprint fingerprint(const std::string& path);

// [{"path": ..., "bytes": ..., "xxh64": "16 hex digits"}, ...]
std::string fingerprints_to_json(const std::vector<FileFingerprint>& files);
std::vector<FileFingerprint> fingerprints_from_json(std::string_view json, const std::string& name);  // Error(data) with `name`

// Throws Error(data) naming the first file that differs in number, size or hash. Paths may differ: data may move.
void require_same_data(const std::vector<FileFingerprint>& saved, const std::vector<FileFingerprint>& found);

}  // namespace mantissa
