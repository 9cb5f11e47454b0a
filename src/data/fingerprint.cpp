#include "mantissa/data/fingerprint.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "mantissa/base/error.h"
#include "mantissa/base/json.h"
#include "mantissa/data/input_file.h"

namespace mantissa {
namespace {

constexpr int64_t kChunk = 1 << 20, kChunks = 64;

// Where the sampled chunk starts: chunk 0 at the start of the file, the last one at its end.
int64_t chunk_offset(int64_t chunk, int64_t bytes) {
  return (bytes - kChunk) / (kChunks - 1) * chunk + (bytes - kChunk) % (kChunks - 1) * chunk / (kChunks - 1);
}

FileFingerprint parse_entry(const nlohmann::json& entry, const std::string& name) {
  const bool complete = entry.is_object() && entry.contains("path") && entry["path"].is_string() && entry.contains("bytes") &&
                        entry["bytes"].is_number_integer() && entry.contains("xxh64") && entry["xxh64"].is_string();
  require(complete, ExitCode::data, name, R"(: a data fingerprint has "path", "bytes" and "xxh64")");
  const auto hash = Hash64::parse(entry["xxh64"].get_ref<const std::string&>());
  require(hash.has_value(), ExitCode::data, name, ": xxh64 is not 16 hex digits");
  return {.path = entry["path"].get<std::string>(), .bytes = entry["bytes"].get<int64_t>(), .hash = *hash};
}

nlohmann::json files_json(const std::vector<FileFingerprint>& files) {
  nlohmann::json out = nlohmann::json::array();
  for (const FileFingerprint& file : files) out.push_back({{"path", file.path}, {"bytes", file.bytes}, {"xxh64", file.hash.text()}});
  return out;
}

std::vector<FileFingerprint> parse_files(const nlohmann::json& root, const char* key, const std::string& name) {
  const bool listed = root.is_object() && root.contains(key) && root[key].is_array();
  require(listed, ExitCode::data, name, ": data fingerprints have an array \"", key, '"');
  std::vector<FileFingerprint> files;
  for (const auto& entry : root[key]) files.push_back(parse_entry(entry, name));
  return files;
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

std::string fingerprints_to_json(const DataFingerprints& data) {
  const nlohmann::json out = {{"train", files_json(data.train)}, {"valid", files_json(data.valid)}};
  return out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // a path may be no UTF-8
}

DataFingerprints fingerprints_from_json(std::string_view json, const std::string& name) {
  const auto root = parse_strict_json(json, name);
  return {.train = parse_files(root, "train", name), .valid = parse_files(root, "valid", name)};
}

void require_same_data(const DataFingerprints& saved, const DataFingerprints& found) {
  require_same_files("training", saved.train, found.train);
  require_same_files("validation", saved.valid, found.valid);
}

}  // namespace mantissa
