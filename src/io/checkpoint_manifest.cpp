#include "mantissa/io/checkpoint_manifest.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "mantissa/base/hash.h"
#include "mantissa/base/json.h"

namespace mantissa {
namespace {

using nlohmann::json;

constexpr size_t kHashLine = 17;  // 16 digits and the end of line

// One object of the manifest: typed access to exactly its keys.
class Fields {
 public:
  Fields(const json& value, std::string where, size_t keys) : value_(value), where_(std::move(where)) {
    require(value.is_object(), ExitCode::data, where_, ": must be an object");
    require(value.size() == keys, ExitCode::data, where_, ": has ", value.size(), " keys instead of ", keys);
  }
  const json& at(const char* key) const {
    const auto found = value_.find(key);
    require(found != value_.end(), ExitCode::data, where_, ": has no \"", key, "\"");
    return *found;
  }
  int64_t count(const char* key) const { return as_count(at(key), where_ + "." + key); }
  std::string string(const char* key) const {
    const json& value = at(key);
    require(value.is_string(), ExitCode::data, where_, ".", key, ": must be a string");
    return value.get<std::string>();
  }
  const json& array(const char* key, size_t most) const {
    const json& value = at(key);
    require(value.is_array(), ExitCode::data, where_, ".", key, ": must be an array");
    require(value.size() <= most, ExitCode::data, where_, ".", key, ": has ", value.size(), " elements, at most ", most, " are accepted");
    return value;
  }
  std::vector<int64_t> counts(const char* key) const {
    std::vector<int64_t> out;
    for (const json& value : array(key, Shape::kMaxRank)) out.push_back(as_count(value, where_ + "." + key));
    return out;
  }
  std::string item(const char* key, size_t index) const { return text(where_, ".", key, "[", index, "]"); }

 private:
  // nlohmann's get<int64_t>() takes 1.5 and wraps 2^63, so the JSON type decides.
  static int64_t as_count(const json& value, const std::string& where) {
    require(value.is_number_unsigned(), ExitCode::data, where, ": must be an integer >= 0");
    const auto number = value.get<uint64_t>();
    require(number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), ExitCode::data, where, ": ", number, " is too large");
    return static_cast<int64_t>(number);
  }

  const json& value_;
  std::string where_;
};

Dtype parse_dtype(const std::string& name, const std::string& where) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f64, Dtype::i32, Dtype::u8})
    if (name == dtype_name(dtype)) return dtype;
  fail(ExitCode::data, where, ": unknown dtype \"", shortened(name), "\"");
}

Shard parse_shard(const json& value, const std::string& where) {
  const Fields fields(value, where, 4);
  Shard shard{.file = fields.string("file"), .bytes = fields.count("bytes"), .chunk_bytes = fields.count("chunk_bytes"), .hashes = {}};
  for (const json& digits : fields.array("xxh64", std::numeric_limits<size_t>::max())) {
    const auto hash = digits.is_string() ? Hash64::parse(digits.get_ref<const std::string&>()) : std::nullopt;
    require(hash.has_value(), ExitCode::data, where, ".xxh64: must hold strings of 16 hex digits");
    shard.hashes.push_back(*hash);
  }
  return shard;
}

ManifestTensor parse_tensor(const json& value, const std::string& where) {
  const Fields fields(value, where, 4);
  ManifestTensor tensor{
      .name = fields.string("name"), .dtype = parse_dtype(fields.string("dtype"), where), .shape = fields.counts("shape"), .pieces = {}};
  const json& pieces = fields.array("pieces", Manifest::kMaxPieces);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Fields piece(pieces[i], fields.item("pieces", i), 4);
    tensor.pieces.push_back({.shard = piece.count("shard"),
                             .box = {.start = piece.counts("start"), .size = piece.counts("size")},
                             .offset = piece.count("offset")});
  }
  return tensor;
}

Manifest parse_fields(const json& root, const std::string& source) {
  const Fields fields(root, source, 11);
  const int64_t version = fields.count("format_version");
  require(version == Manifest::kFormatVersion, ExitCode::data, source, ": format version ", version, ", this program reads version ",
          Manifest::kFormatVersion);
  const Fields prints(fields.at("fingerprints"), source + ".fingerprints", 3);
  Manifest manifest{.step = fields.count("step"),
                    .samples = fields.count("samples"),
                    .config = fields.at("config").dump(),
                    .tokenizer = fields.at("tokenizer").dump(),
                    .plan = fields.at("plan").dump(),
                    .layout = fields.at("layout").dump(),
                    .state = fields.at("state").dump(),
                    .config_fingerprint = prints.string("config"),
                    .dataset_fingerprint = prints.string("dataset"),
                    .build_fingerprint = prints.string("build"),
                    .shards = {},
                    .tensors = {}};
  const json& shards = fields.array("shards", Manifest::kMaxShards);
  for (size_t i = 0; i < shards.size(); ++i) manifest.shards.push_back(parse_shard(shards[i], fields.item("shards", i)));
  const json& tensors = fields.array("tensors", Manifest::kMaxTensors);
  for (size_t i = 0; i < tensors.size(); ++i) manifest.tensors.push_back(parse_tensor(tensors[i], fields.item("tensors", i)));
  return manifest;
}

json shard_json(const Shard& shard) {
  json hashes = json::array();
  for (const Hash64 hash : shard.hashes) hashes.push_back(hash.text());
  return {{"file", shard.file}, {"bytes", shard.bytes}, {"chunk_bytes", shard.chunk_bytes}, {"xxh64", std::move(hashes)}};
}

json tensor_json(const ManifestTensor& tensor) {
  json pieces = json::array();
  for (const Piece& piece : tensor.pieces)
    pieces.push_back({{"shard", piece.shard}, {"start", piece.box.start}, {"size", piece.box.size}, {"offset", piece.offset}});
  return {{"name", tensor.name}, {"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"pieces", std::move(pieces)}};
}

json parse_part(const std::string& content, const char* name) {
  return parse_strict_json(content, text("checkpoint ", name), ExitCode::internal);
}

}  // namespace

int64_t Box::elements() const {
  int64_t n = 1;
  for (const int64_t s : size) n *= s;
  return n;
}

std::vector<int64_t> dimensions(const Shape& shape) {
  std::vector<int64_t> out;
  for (int i = 0; i < shape.rank(); ++i) out.push_back(shape[i]);
  return out;
}

Box whole_box(const std::vector<int64_t>& shape) { return {.start = std::vector<int64_t>(shape.size(), 0), .size = shape}; }

std::string shape_text(const std::vector<int64_t>& shape) { return "[" + joined(shape) + "]"; }

std::string format_manifest(const Manifest& manifest) {
  json shards = json::array(), tensors = json::array();
  for (const Shard& shard : manifest.shards) shards.push_back(shard_json(shard));
  for (const ManifestTensor& tensor : manifest.tensors) tensors.push_back(tensor_json(tensor));
  const std::pair<const char*, json> parts[] = {
      {"format_version", Manifest::kFormatVersion},
      {"step", manifest.step},
      {"samples", manifest.samples},
      {"config", parse_part(manifest.config, "config")},
      {"tokenizer", parse_part(manifest.tokenizer, "tokenizer")},
      {"plan", parse_part(manifest.plan, "plan")},
      {"layout", parse_part(manifest.layout, "layout")},
      {"fingerprints",
       {{"config", manifest.config_fingerprint}, {"dataset", manifest.dataset_fingerprint}, {"build", manifest.build_fingerprint}}},
      {"state", parse_part(manifest.state, "state")},
      {"shards", std::move(shards)},
      {"tensors", std::move(tensors)}};
  std::string out;
  try {
    for (const auto& [key, value] : parts) out += text(out.empty() ? "{\n" : ",\n", "\"", key, "\": ", value.dump());
  } catch (const json::exception& error) {
    fail(ExitCode::internal, "checkpoint manifest: ", error.what());
  }
  out += "\n}\n";
  return out + xxh64(out).text() + "\n";
}

Manifest parse_manifest(std::string_view content, const std::string& source) {
  require(content.size() > kHashLine && content.back() == '\n' && content[content.size() - kHashLine - 1] == '\n', ExitCode::data, source,
          ": is incomplete: it does not end with the line of its hash");
  const std::string_view body = content.substr(0, content.size() - kHashLine);
  require(Hash64::parse(manifest_hash(content)) == xxh64(body), ExitCode::data, source, ": is damaged: its hash is ", xxh64(body),
          ", its last line says otherwise");
  Manifest manifest = parse_fields(parse_strict_json(body, source), source);
  check_manifest(manifest, source, ExitCode::data);
  return manifest;
}

std::string manifest_hash(std::string_view content) { return std::string(content.substr(content.size() - kHashLine, kHashLine - 1)); }

}  // namespace mantissa
