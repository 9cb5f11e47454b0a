#include "data/token_writer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <string_view>

#include "data/documents.h"
#include "mantissa/base/error.h"

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

namespace {

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();

bool megatron_is_wide(int64_t vocab_size) { return vocab_size >= 65500; }
bool llmc_is_wide(int64_t vocab_size) { return vocab_size > 65536; }

void append_id(PendingFile& file, int32_t id, bool wide, int64_t vocab_size) {
  require(id >= 0 && id < vocab_size, "token ", id, " of a vocabulary of ", vocab_size);
  if (wide) {
    file.append_value(id);
  } else {
    file.append_value(static_cast<uint16_t>(id));
  }
}

}  // namespace

MegatronWriter::MegatronWriter(const std::string& prefix, const TokenWriterOptions& options)
    : options_(options), prefix_(prefix), bin_(prefix + ".bin"), idx_(prefix + ".idx") {}

void MegatronWriter::add_document(std::span<const int32_t> ids) {
  if (ids.empty()) return;
  const bool appends = options_.eod_id && ids.back() != options_.eod_id;
  const int64_t length = static_cast<int64_t>(ids.size()) + (appends ? 1 : 0);
  require(length <= kMostTokens, ExitCode::usage, prefix_, ": a document of ", length, " tokens; Megatron files hold at most ",
          kMostTokens);
  const bool wide = megatron_is_wide(options_.vocab_size);
  for (const int32_t id : ids) append_id(bin_, id, wide, options_.vocab_size);
  if (appends) append_id(bin_, *options_.eod_id, wide, options_.vocab_size);
  lengths_.push_back(static_cast<int32_t>(length));
}

int64_t MegatronWriter::finish() {
  const bool wide = megatron_is_wide(options_.vocab_size);
  const auto sequences = static_cast<int64_t>(lengths_.size());
  idx_.append(std::as_bytes(std::span(std::string_view("MMIDIDX\0\0", 9))));
  idx_.append_value(uint64_t{1});
  idx_.append_value(wide ? uint8_t{4} : uint8_t{8});
  idx_.append_value(sequences);
  idx_.append_value(sequences + 1);
  idx_.append_values(lengths_);
  int64_t tokens = 0;
  for (const int32_t length : lengths_) {
    idx_.append_value(tokens * (wide ? 4 : 2));
    tokens += length;
  }
  for (int64_t sequence = 0; sequence <= sequences; ++sequence) idx_.append_value(sequence);
  bin_.sync();
  idx_.sync();
  // Removes the index of an older pair first: no reader may see one file of each.
  std::error_code error;
  std::filesystem::remove(prefix_ + ".idx", error);
  require(!error, ExitCode::storage, prefix_, ".idx: cannot be replaced: ", error.message());
  bin_.publish();
  idx_.publish();
  return tokens;
}

LlmcWriter::LlmcWriter(const std::string& path, const TokenWriterOptions& options) : options_(options), file_(path) {
  file_.append_values(std::vector<int32_t>(256, 0));
}

void LlmcWriter::add_document(std::span<const int32_t> ids) {
  if (ids.empty()) return;
  const bool prepends = options_.eod_id && ids.front() != options_.eod_id && last_ != options_.eod_id;
  last_ = ids.back();
  tokens_ += static_cast<int64_t>(ids.size()) + (prepends ? 1 : 0);
  require(tokens_ <= kMostTokens, ExitCode::usage, "an llm.c file holds at most ", kMostTokens, " tokens; split the input");
  const bool wide = llmc_is_wide(options_.vocab_size);
  if (prepends) append_id(file_, *options_.eod_id, wide, options_.vocab_size);
  for (const int32_t id : ids) append_id(file_, id, wide, options_.vocab_size);
}

int64_t LlmcWriter::finish() {
  const bool wide = llmc_is_wide(options_.vocab_size);
  const std::array<int32_t, 3> header = {wide ? 20240801 : 20240520, wide ? 7 : 1, static_cast<int32_t>(tokens_)};
  file_.write_front(std::as_bytes(std::span(header)));
  file_.sync();
  file_.publish();
  return tokens_;
}

void ExampleWriter::add_document(std::span<const int32_t> ids, const std::vector<bool>& trained) {
  if (ids.empty()) return;
  std::string tokens, mask;
  for (size_t i = 0; i < ids.size(); ++i) {
    tokens += (i > 0 ? "," : "") + std::to_string(ids[i]);
    mask += i > 0 ? "," : "";
    mask += trained[i] ? '1' : '0';
  }
  require(tokens.size() + mask.size() + 32 < InputFile::kLongestLine, ExitCode::usage, "a document of ", ids.size(),
          " tokens makes a line of more than ", InputFile::kLongestLine >> 20, " MiB, which no reader takes; cut it into several");
  const std::string line = R"({"tokens":[)" + tokens + R"(],"mask":[)" + mask + "]}\n";
  file_.append(std::as_bytes(std::span(line)));
  tokens_ += static_cast<int64_t>(ids.size());
}

int64_t ExampleWriter::finish() {
  file_.sync();
  file_.publish();
  return tokens_;
}

}  // namespace mantissa
