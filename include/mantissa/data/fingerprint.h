// Checks that the data have not changed: size and xxh64 of each file are kept in the checkpoint and compared on resume.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mantissa/base/hash.h"
#include "mantissa/json/fields.h"

namespace mantissa {

struct FileFingerprint {
  std::string path;
  int64_t bytes = 0;
  // Hashes the whole file below 64 MiB; of larger ones 64 chunks of 1 MiB, evenly spaced, the first and last MiB included.
  Hash64 hash;

  void fields(auto& v) {
    v("bytes", bytes, limits::not_negative);
    v("path", path);
    v("xxh64", hash);
  }
};

struct DataFingerprints {  // in the order of the files
  std::vector<FileFingerprint> train, valid;

  void fields(auto& v) {
    v("train", train);
    v("valid", valid);
  }
};

// Reads at most 64 MiB, whatever the size: in a larger file a change of the same length between the chunks goes unnoticed.
FileFingerprint fingerprint(const std::string& path);

// Throws Error(data) naming the first file that differs in number, size or hash. Paths may differ: data may move. Validation data count
// too: over other data neither the curve nor the best loss of the run would mean anything.
void require_same_data(const DataFingerprints& saved, const DataFingerprints& found);

}  // namespace mantissa
