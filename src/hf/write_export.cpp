#include "mantissa/hf/write_export.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "mantissa/base/hash.h"
#include "mantissa/base/version.h"
#include "mantissa/hf/export_files.h"
#include "mantissa/hf/hf_weights.h"
#include "mantissa/io/pending_folder.h"
#include "mantissa/io/plain_file_name.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kProof = "mantissa.json";
constexpr int kFormatVersion = 2;  // 1 had no hash of itself
constexpr int64_t kHashChunkBytes = 2 << 20;

std::string type_text(const std::string& dtype, const std::vector<int64_t>& shape) { return text(dtype, " ", shape_text(shape)); }

ProvenTensor proven_tensor(const json& entry, const std::string& source) {
  const auto of = [&](const char* member) { return entry.is_object() ? entry.value(member, json()) : json(); };
  const json name = of("tensor"), dtype = of("dtype"), shape = of("shape"), hash = of("xxh64");
  const bool sizes = shape.is_array() && std::ranges::all_of(shape, [](const json& size) { return size.is_number_integer(); });
  require(name.is_string() && dtype.is_string() && sizes && hash.is_string(), ExitCode::data, source,
          ": tensors must have tensor, dtype, shape and xxh64");
  return {.name = name.get<std::string>(),
          .type = type_text(dtype.get<std::string>(), shape.get<std::vector<int64_t>>()),
          .xxh64 = hash.get<std::string>()};
}

// Of all that it says, but for the hash itself.
std::string proof_hash(json proof) {
  proof.erase("xxh64");
  return xxh64(proof.dump()).text();
}

json read_proof(const fs::path& folder) {
  const std::string source = (folder / kProof).string();
  std::error_code error;
  require(fs::exists(folder / kProof, error), ExitCode::usage, source,
          ": there is none, so nothing says what the weights were; --against CHECKPOINT compares them");
  json proof = parse_strict_json(hf_file(folder, kProof), source);
  const json version = proof.is_object() ? proof.value("format_version", json()) : json();
  require(version == 1 || version == kFormatVersion, ExitCode::data, source, ": format_version must be 1 or ", kFormatVersion);
  require(proof.value("tensors", json()).is_array(), ExitCode::data, source, ": tensors must be a list");
  require(proof.value("files", json()).is_object(), ExitCode::data, source, ": files must be an object");
  return proof;
}

std::vector<ProvenTensor> proven_tensors(const json& proof, const std::string& source) {
  std::vector<ProvenTensor> tensors;
  for (const json& entry : proof["tensors"]) tensors.push_back(proven_tensor(entry, source));
  return tensors;
}

void verify_file(const fs::path& folder, const std::string& name, const json& hash) {
  const std::string source = (folder / kProof).string();
  require(is_plain_file_name(name) && hash.is_string(), ExitCode::data, source, ": files must be names of files with hashes");
  std::error_code error;
  require(fs::exists(folder / name, error), ExitCode::data, folder.string(), ": lacks ", name, ", which ", kProof, " names");
  require(xxh64(hf_file(folder, name)).text() == hash.get<std::string>(), ExitCode::data, folder.string(), ": ", name,
          " is not what was exported: its hash differs");
}

std::vector<TokenizerFile> files_beside(const ExportedWeights& exported, const ExportHead& head) {
  std::vector<TokenizerFile> files = model_files(head.files, head.tokenizer);
  files.push_back({.name = "config.json",
                   .bytes = architecture_config(head.model, exported.common_dtype(), special_tokens(head.files), exported.quantization())});
  if (head.options.weights == ExportWeights::packed && head.options.convention == Convention::modelopt)
    files.push_back({.name = kModeloptSideFile, .bytes = modelopt_side_file(exported.modules())});
  return files;
}

void write_files(const ExportedWeights& exported, const ExportHead& head, json tensors, const fs::path& folder) {
  json hashes = json::object();
  for (const TokenizerFile& file : files_beside(exported, head)) {
    write_export_file(folder, file.name, file.bytes);
    hashes[file.name] = xxh64(file.bytes).text();
  }
  json proof = {{"format_version", kFormatVersion},
                {"mantissa", version()},
                {"checkpoint", {{"step", head.step}, {"manifest", head.manifest}}},
                {"files", std::move(hashes)},
                {"tensors", std::move(tensors)}};
  proof["xxh64"] = proof_hash(proof);
  write_export_file(folder, kProof, proof.dump(1) + "\n");
}

}  // namespace

ExportedModel write_export(const ExportedWeights& exported, ForwardReader& weights, const ExportHead& head, const fs::path& output,
                           const std::function<void(const fs::path&)>& read_back) {
  std::optional<PendingFolder> pending;
  std::optional<SafetensorsWriter> writer;
  weights.at_writer([&] {
    pending.emplace(output);
    writer.emplace(pending->path(), exported.tensors());
  });
  json tensors = exported.write(weights, [&](std::span<const std::byte> bytes) { writer->write(bytes); });
  weights.at_writer([&] {
    writer->finish();
    write_files(exported, head, std::move(tensors), pending->path());
  });
  read_back(pending ? pending->path() : fs::path());
  weights.at_writer([&] { pending->publish(); });
  ExportedModel out{.architecture = exported.architecture()};
  for (const SafetensorsTensor& tensor : exported.tensors()) {
    ++out.tensors;
    out.bytes += safetensors_bytes(tensor);
  }
  return out;
}

ExportProof::ExportProof(const fs::path& folder) : folder_(folder), files_(folder) {
  const json proof = read_proof(folder);
  for (const auto& [name, hash] : proof["files"].items()) verify_file(folder, name, hash);
  tensors_ = proven_tensors(proof, (folder / kProof).string());
  std::set<std::string_view> named;
  for (const ProvenTensor& tensor : tensors_) {
    require(named.insert(tensor.name).second, ExitCode::data, (folder / kProof).string(), ": names ", tensor.name, " twice");
    require(files_.find(tensor.name) != nullptr, ExitCode::data, folder.string(), ": lacks ", tensor.name, ", which ", kProof, " names");
  }
  for (const SafetensorsEntry& entry : files_.entries())
    require(named.contains(entry.name), ExitCode::data, folder.string(), ": holds ", entry.name, ", which ", kProof, " does not name");
  for (const fs::path& file : files_.files())
    require(SafetensorsFile(file).metadata() == SafetensorsMetadata{{"format", "pt"}}, ExitCode::data, file.string(),
            ": is not what was exported: its __metadata__ differs");
  require(proof["format_version"] == 1 || proof.value("xxh64", json()) == proof_hash(proof), ExitCode::data, (folder / kProof).string(),
          ": is not what was exported: its hash of itself differs");
}

void ExportProof::verify(size_t tensor) {
  const auto& [name, type, xxh64] = tensors_.at(tensor);
  const SafetensorsEntry* const found = files_.find(name);
  const std::string there = type_text(file_dtype_name(found->dtype), found->shape);
  require(there == type, ExitCode::data, folder_.string(), ": ", name, " is not what was exported: it is ", there, ", and was ", type);
  StreamHash hash;
  std::vector<std::byte> chunk;
  for (int64_t at = 0; at < found->bytes(); at += kHashChunkBytes) {
    chunk.resize(static_cast<size_t>(std::min(kHashChunkBytes, found->bytes() - at)));
    files_.read(*found, at, chunk);
    hash.update(chunk);
  }
  require(hash.finish().text() == xxh64, ExitCode::data, folder_.string(), ": ", name, " is not what was exported: its hash differs");
}

}  // namespace mantissa
