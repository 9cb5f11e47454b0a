#include "mantissa/data/fingerprint.h"

#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <memory>
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

std::string hex(uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
  return digits;
}

FileFingerprint parse_entry(const nlohmann::json& entry, const std::string& name) {
  const bool complete = entry.is_object() && entry.contains("path") && entry["path"].is_string() && entry.contains("bytes") &&
                        entry["bytes"].is_number_integer() && entry.contains("xxh64") && entry["xxh64"].is_string();
  require(complete, ExitCode::data, name, R"(: a data fingerprint has "path", "bytes" and "xxh64")");
  const auto& digits = entry["xxh64"].get_ref<const std::string&>();
  FileFingerprint out{.path = entry["path"].get<std::string>(), .bytes = entry["bytes"].get<int64_t>()};
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), out.hash, 16);
  require(digits.size() == 16 && parsed.ec == std::errc() && parsed.ptr == digits.data() + digits.size(), ExitCode::data, name,
          ": xxh64 is not 16 hex digits");
  return out;
}

nlohmann::json files_json(const std::vector<FileFingerprint>& files) {
  nlohmann::json out = nlohmann::json::array();
  for (const FileFingerprint& file : files) out.push_back({{"path", file.path}, {"bytes", file.bytes}, {"xxh64", hex(file.hash)}});
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
            " data changed since the checkpoint: ", was.path, " had ", was.bytes, " bytes and xxh64 ", hex(was.hash), ", now ", is.bytes,
            " bytes and ", hex(is.hash));
  }
  require(saved.size() == found.size(), ExitCode::data, "the ", what, " data changed since the checkpoint: ", saved.size(), " files then, ",
          found.size(), " now");
}

}  // namespace

FileFingerprint fingerprint(const std::string& path) {
  const InputFile file(path);
  const std::unique_ptr<XXH64_state_t, XXH_errorcode (*)(XXH64_state_t*)> state(XXH64_createState(), XXH64_freeState);
  XXH64_reset(state.get(), 0);
  if (file.size() < kChunk * kChunks) {
    file.for_each_window([&](std::string_view bytes, int64_t) { XXH64_update(state.get(), bytes.data(), bytes.size()); });
  } else {
    std::vector<char> bytes(static_cast<size_t>(kChunk));
    for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
      file.read(chunk_offset(chunk, file.size()), bytes.data(), kChunk);
      XXH64_update(state.get(), bytes.data(), bytes.size());
    }
  }
  return {.path = path, .bytes = file.size(), .hash = XXH64_digest(state.get())};
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
