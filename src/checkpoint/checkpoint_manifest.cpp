#include "mantissa/checkpoint/checkpoint_manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "mantissa/base/hash.h"
#include "mantissa/json/json.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

constexpr size_t kHashLine = 17;  // 16 digits and the end of line

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

std::optional<NamedDtype> NamedDtype::parse(const std::string& name) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f64, Dtype::i32, Dtype::u8}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  return {};
}

int64_t Manifest::bytes() const {
  int64_t sum = 0;
  for (const Shard& shard : shards) sum += shard.bytes;
  return sum;
}

std::string format_manifest(const Manifest& manifest) {
  check_manifest(manifest, "checkpoint manifest", ExitCode::internal);
  std::string out;
  for (const Field& field : fields_of(const_cast<Manifest&>(manifest))) {  // which are only read
    out += text(out.empty() ? "{\n" : ",\n", '"', field.name, "\": ", json_text(field));
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
  const nlohmann::json root = parse_strict_json(body, source);
  const JsonReader reader(root, source);
  const auto version = reader.at("format_version").as<int64_t>();
  require(version == Manifest::kFormatVersion, ExitCode::data, source, ": format version ", version, ", this program reads version ",
          Manifest::kFormatVersion);
  Manifest manifest = reader.as<Manifest>({}, UnknownNames::refused);
  check_manifest(manifest, source, ExitCode::data);
  return manifest;
}

std::string manifest_hash(std::string_view content) { return std::string(content.substr(content.size() - kHashLine, kHashLine - 1)); }

}  // namespace mantissa
