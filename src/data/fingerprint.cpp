#include "mantissa/data/fingerprint.h"

#include <algorithm>

#include "mantissa/base/error.h"
#include "mantissa/data/input_file.h"

namespace mantissa {
namespace {

constexpr int64_t kChunk = 1 << 20, kChunks = 64;

// Returns where the sampled chunk starts: chunk 0 at the start of the file, the last one at its end.
int64_t chunk_offset(int64_t chunk, int64_t bytes) {
  return (bytes - kChunk) / (kChunks - 1) * chunk + (bytes - kChunk) % (kChunks - 1) * chunk / (kChunks - 1);
}

void require_same_files(const char* what, const std::vector<FileFingerprint>& saved, const std::vector<FileFingerprint>& found) {
  for (size_t i = 0; i < std::min(saved.size(), found.size()); ++i) {
    const FileFingerprint &was = saved[i], &is = found[i];
    require(was.bytes == is.bytes && was.hash == is.hash, ExitCode::data, is.path, ": the ", what,
            " data changed since the checkpoint: ", was.path, " had ", was.bytes, " bytes and xxh64 ", was.hash, ", now ", is.bytes,
            " bytes and ", is.hash);
  }
  require(saved.size() == found.size(), ExitCode::data, "the ", what, " data changed since the checkpoint: ", saved.size(), " files then, ",
          found.size(), " now");
}

}  // namespace

FileFingerprint fingerprint(const std::string& path) {
  const InputFile file(path);
  StreamHash hash;
  if (file.size() < kChunk * kChunks) {
    file.for_each_window([&](std::string_view bytes, int64_t) { hash.update(std::as_bytes(std::span(bytes))); });
  } else {
    std::vector<std::byte> bytes(static_cast<size_t>(kChunk));
    for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
      file.read(chunk_offset(chunk, file.size()), bytes.data(), kChunk);
      hash.update(bytes);
    }
  }
  return {.path = path, .bytes = file.size(), .hash = hash.finish()};
}

void require_same_data(const DataFingerprints& saved, const DataFingerprints& found) {
  require_same_files("training", saved.train, found.train);
  require_same_files("validation", saved.valid, found.valid);
}

}  // namespace mantissa
