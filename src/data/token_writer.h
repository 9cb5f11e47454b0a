// Writes token files for mantissa and others to read (byte formats: src/data/token_file.cpp). Everything goes to NAME.tmp, is synced and
// takes its name in finish(); a writer destroyed before leaves nothing behind. Failures to write throw Error(storage).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/hash.h"
#include "mantissa/json/fields.h"

namespace mantissa {

// Checks that the data have not changed: size and xxh64 of each file are kept in the checkpoint and compared on resume.

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

struct TokenWriterOptions {
  int64_t vocab_size = 0;              // chooses the width of an id
  std::optional<int32_t> eod_id = {};  // between documents, once; none: they follow each other bare
};

// Writes Megatron's PREFIX.bin and PREFIX.idx: u16 ids for a vocabulary below 65500, else i32; one sequence a document, eod_id at its end.
class MegatronWriter {
 public:
  MegatronWriter(const std::string& prefix, const TokenWriterOptions& options);

  // Ids must be in [0, vocab_size). An empty document is left out.
  void add_document(std::span<const int32_t> ids);
  // Returns the number of tokens written.
  int64_t finish();

 private:
  TokenWriterOptions options_;
  std::string prefix_;
  PendingFile bin_, idx_;
  std::vector<int32_t> lengths_;
};

// Writes an llm.c shard: u16 ids for a vocabulary of at most 65536, else the u32 variant; eod_id at the start of each document, as llm.c
// has it, unless the one before ends with it. Throws Error(usage) beyond the 2^31 - 1 tokens that its header can say.
class LlmcWriter {
 public:
  LlmcWriter(const std::string& path, const TokenWriterOptions& options);

  void add_document(std::span<const int32_t> ids);
  int64_t finish();

 private:
  TokenWriterOptions options_;
  PendingFile file_;
  int64_t tokens_ = 0;
  std::optional<int32_t> last_ = {};  // the last id written
};

// Writes JSONL of examples, {"tokens": [...], "mask": [...]}: the form that keeps which tokens are trained (example.h).
class ExampleWriter {
 public:
  explicit ExampleWriter(const std::string& path) : file_(path) {}

  // An empty document is left out.
  void add_document(std::span<const int32_t> ids, const std::vector<bool>& trained);
  int64_t finish();

 private:
  PendingFile file_;
  int64_t tokens_ = 0;
};

}  // namespace mantissa
