#include "hf/export_proof.h"

#include <map>
#include <set>
#include <string_view>

#include "mantissa/base/version.h"
#include "mantissa/hf/export.h"
#include "mantissa/hf/export_files.h"
#include "mantissa/hf/hf_weights.h"
#include "mantissa/io/plain_file_name.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr int kFormatVersion = 2;

// A tensor as the file describes it.
struct NamedTensor {
  std::string tensor, dtype, xxh64;
  std::vector<int64_t> shape;

  void fields(auto& v) {
    v("tensor", tensor);
    v("dtype", dtype);
    v("shape", shape);
    v("xxh64", xxh64);
  }
};

// The options of an export as far as they had an effect.
struct ProvenOptions {
  ExportWeights weights = {};
  std::optional<Convention> convention = {};  // none: the weights are values, or in the form of gpt-oss
  ExportDtype dtype = {};

  void fields(auto& v) {
    v("weights", weights);
    v("convention", convention);
    v("dtype", dtype);
  }
  bool are(const ExportOptions& options) const {
    return weights == options.weights && convention.value_or(options.convention) == options.convention && dtype == options.dtype;
  }
};

// Part of the file that is read. The rest is for people and other readers, and is covered by its hash.
struct ExportProof {
  std::optional<ProvenCheckpoint> checkpoint;
  std::optional<ProvenOptions> options;      // none: of an earlier version
  std::map<std::string, std::string> files;  // their hashes
  std::vector<NamedTensor> tensors;
  std::string xxh64;

  void fields(auto& v) {
    v("checkpoint", checkpoint);
    v("options", options, limits::later);
    v("files", files);
    v("tensors", tensors);
    v("xxh64", xxh64);
  }
};

std::string type_text(const std::string& dtype, const std::vector<int64_t>& shape) { return text(dtype, " ", shape_text(shape)); }

// Returns the hash of all members but the hash itself.
std::string proof_hash(Json proof) {
  proof.members().erase("xxh64");
  return xxh64(proof.dump()).text();
}

Json read_proof(const fs::path& folder) {
  const std::string source = (folder / kProofFile).string();
  std::error_code error;
  require(fs::exists(folder / kProofFile, error), ExitCode::usage, source,
          ": there is none, so nothing says what the weights were; --against CHECKPOINT compares them");
  Json proof = parse_json(hf_file(folder, kProofFile), source);
  require(proof.get("format_version") == kFormatVersion, ExitCode::data, source, ": format_version: must be ", kFormatVersion, ", got ",
          proof.get("format_version").shown());
  return proof;
}

void verify_file(const fs::path& folder, const std::string& name, const std::string& hash) {
  require(is_plain_file_name(name), ExitCode::data, (folder / kProofFile).string(), ": files: ", Json(name).shown(),
          " is no name of a file");
  std::error_code error;
  require(fs::exists(folder / name, error), ExitCode::data, folder.string(), ": lacks ", name, ", which ", kProofFile, " names");
  require(xxh64(hf_file(folder, name)).text() == hash, ExitCode::data, folder.string(), ": ", name,
          " is not what was exported: its hash differs");
}

Json entry_of(const ProvenTensor& tensor) {
  Json entry = {{"tensor", tensor.name}, {"module", tensor.module}, {"dtype", tensor.dtype},
                {"shape", tensor.shape}, {"format", nullptr},       {"xxh64", tensor.hash.text()}};
  if (!tensor.how) return entry;
  entry["format"] = format_name(tensor.how.format);
  entry["block"] = {tensor.how.block_rows, tensor.how.block_cols};
  entry["rule"] = scale_rule_name(tensor.how.rule);
  if (tensor.how.range != ScaleRange{}) entry["scale_range"] = {tensor.how.range.least - 127, tensor.how.range.most - 127};
  return entry;
}

void require_all_named(const SafetensorsFolder& files, const std::vector<NamedTensor>& tensors, const fs::path& folder) {
  std::set<std::string_view> named;
  for (const NamedTensor& tensor : tensors) {
    require(named.insert(tensor.tensor).second, ExitCode::data, (folder / kProofFile).string(), ": names ", tensor.tensor, " twice");
    require(files.find(tensor.tensor) != nullptr, ExitCode::data, folder.string(), ": lacks ", tensor.tensor, ", which ", kProofFile,
            " names");
  }
  for (const SafetensorsEntry& entry : files.entries())
    require(named.contains(entry.name), ExitCode::data, folder.string(), ": holds ", entry.name, ", which ", kProofFile, " does not name");
}

void verify_tensor(SafetensorsFolder& files, const NamedTensor& tensor, const fs::path& folder) {
  const SafetensorsEntry* const found = files.find(tensor.tensor);
  const std::string here = type_text(file_dtype_name(found->dtype), found->shape), exported = type_text(tensor.dtype, tensor.shape);
  require(here == exported, ExitCode::data, folder.string(), ": ", tensor.tensor, " is not what was exported: it is ", here, ", and was ",
          exported);
  const Hash64 hash = xxh64(found->bytes(), [&](int64_t at, std::span<std::byte> piece) { files.read(*found, at, piece); });
  require(hash.text() == tensor.xxh64, ExitCode::data, folder.string(), ": ", tensor.tensor, " is not what was exported: its hash differs");
}

}  // namespace

void write_export_proof(const fs::path& folder, const std::optional<ProvenCheckpoint>& checkpoint, const ExportOptions& options,
                        bool has_convention, const std::vector<TokenizerFile>& files, const std::vector<ProvenTensor>& tensors) {
  Json hashes = Json::Members(), entries = Json::Entries(), from;
  for (const TokenizerFile& file : files) hashes[file.name] = xxh64(file.bytes).text();
  for (const ProvenTensor& tensor : tensors) entries.entries().push_back(entry_of(tensor));
  if (checkpoint) from = {{"step", checkpoint->step}, {"manifest", checkpoint->manifest}};
  ProvenOptions proven{.weights = options.weights, .dtype = options.dtype};
  if (has_convention) proven.convention = options.convention;
  Json proof = {{"format_version", kFormatVersion}, {"mantissa", version()},
                {"checkpoint", std::move(from)},    {"options", parse_json(json_text(proven), "options", ExitCode::internal)},
                {"files", std::move(hashes)},       {"tensors", std::move(entries)}};
  proof["xxh64"] = proof_hash(proof);
  write_export_file(folder, kProofFile, proof.dump(1) + "\n");
}

int64_t verify_export(const fs::path& folder) {
  SafetensorsFolder files(folder);
  const Json whole = read_proof(folder);
  const std::string source = (folder / kProofFile).string();
  const auto proof = JsonReader(whole, source).as<ExportProof>();
  for (const auto& [name, hash] : proof.files) verify_file(folder, name, hash);
  require_all_named(files, proof.tensors, folder);
  for (const fs::path& file : files.files())
    require(SafetensorsFile(file).metadata() == SafetensorsMetadata{{"format", "pt"}}, ExitCode::data, file.string(),
            ": is not what was exported: its __metadata__ differs");
  require(proof.xxh64 == proof_hash(whole), ExitCode::data, source, ": is not what was exported: its hash of itself differs");
  for (const NamedTensor& tensor : proof.tensors) verify_tensor(files, tensor, folder);
  return std::ssize(proof.tensors);
}

bool is_export_of(const fs::path& folder, const std::string& manifest, const ExportOptions& options) {
  std::error_code error;
  if (!fs::exists(folder / kProofFile, error)) return false;
  const Json whole = read_proof(folder);
  const auto proof = JsonReader(whole, (folder / kProofFile).string()).as<ExportProof>();
  return proof.checkpoint && proof.checkpoint->manifest == manifest && proof.options && proof.options->are(options);
}

}  // namespace mantissa
