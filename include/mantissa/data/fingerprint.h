// Whether the data are still what they were: size and xxh64 of each file, kept in the checkpoint and compared on resume.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/base/hash.h"

namespace mantissa {

struct FileFingerprint {
  std::string path;
  int64_t bytes = 0;
  // Of the whole file below 64 MiB; of larger ones 64 chunks of 1 MiB, evenly spaced, the first and last MiB included.
  Hash64 hash;
};

struct DataFingerprints {  // in the order of the files
  std::vector<FileFingerprint> train, valid;
};

// At most 64 MiB are read, whatever the size: in a larger file a change of the same length between the chunks goes unnoticed.
FileFingerprint fingerprint(const std::string& path);

// {"train": [{"path": ..., "bytes": ..., "xxh64": "16 hex digits"}, ...], "valid": [...]}
std::string fingerprints_to_json(const DataFingerprints& data);
DataFingerprints fingerprints_from_json(std::string_view json, const std::string& name);  // Error(data) with `name`

// Throws Error(data) naming the first file that differs in number, size or hash. Paths may differ: data may move. Validation data count
// too: over other data neither the curve nor the best loss of the run would mean anything.
void require_same_data(const DataFingerprints& saved, const DataFingerprints& found);

}  // namespace mantissa
