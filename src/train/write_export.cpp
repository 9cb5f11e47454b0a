#include "train/write_export.h"

#include <algorithm>

#include "mantissa/base/hash.h"
#include "mantissa/base/json.h"
#include "mantissa/base/version.h"
#include "mantissa/io/pending_folder.h"
#include "train/export_files.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kProof = "mantissa.json";
constexpr int64_t kSlabBytes = 2 << 20;

json read_proof(const fs::path& folder) {
  const std::string source = (folder / kProof).string();
  std::error_code error;
  require(fs::exists(folder / kProof, error), ExitCode::usage, source,
          ": there is none, so nothing says what the weights were; --against CHECKPOINT compares them");
  json proof = parse_strict_json(family_file(folder, kProof), source);
  require(proof.is_object() && proof.contains("tensors") && proof["tensors"].is_array(), ExitCode::data, source,
          ": tensors must be a list");
  return proof;
}

void write_files(const ExportedWeights& exported, const ExportHead& head, json tensors, const fs::path& folder) {
  write_export_file(folder, "config.json",
                    family_config(head.model, exported.common_dtype(), special_tokens(head.files), exported.quantization()));
  if (head.options.weights == ExportWeights::packed && head.options.convention == Convention::modelopt)
    write_export_file(folder, "hf_quant_config.json", modelopt_side_file(exported.modules()));
  write_model_files(head.files, head.tokenizer, folder);
  const json proof = {{"format_version", 1},
                      {"mantissa", version()},
                      {"checkpoint", {{"step", head.step}, {"manifest", head.manifest}}},
                      {"tensors", std::move(tensors)}};
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
  ExportedModel out{.family = exported.family()};
  for (const SafetensorsTensor& tensor : exported.tensors()) {
    ++out.tensors;
    out.bytes += safetensors_bytes(tensor);
  }
  return out;
}

ExportProof::ExportProof(const fs::path& folder) : folder_(folder), proof_(read_proof(folder)), files_(folder) {}

void ExportProof::require_no_others() const {
  require(tensors() == files_.entries().size(), ExitCode::data, folder_.string(), ": holds ", files_.entries().size(), " tensors, ", kProof,
          " names ", tensors());
}

void ExportProof::verify(size_t tensor) {
  const json& entry = proof_["tensors"][tensor];
  const bool good = entry.is_object() && entry.value("tensor", json()).is_string() && entry.value("xxh64", json()).is_string();
  require(good, ExitCode::data, (folder_ / kProof).string(), ": tensors must have a name and a hash");
  const std::string name = entry["tensor"].get<std::string>();
  const SafetensorsEntry* const found = files_.find(name);
  require(found != nullptr, ExitCode::data, folder_.string(), ": lacks ", name, ", which ", kProof, " names");
  StreamHash hash;
  std::vector<std::byte> slab;
  for (int64_t at = 0; at < found->bytes(); at += kSlabBytes) {
    slab.resize(static_cast<size_t>(std::min(kSlabBytes, found->bytes() - at)));
    files_.read(*found, at, slab);
    hash.update(slab);
  }
  require(hash.finish().text() == entry["xxh64"].get<std::string>(), ExitCode::data, folder_.string(), ": ", name,
          " is not what was exported: its hash differs");
}

}  // namespace mantissa
