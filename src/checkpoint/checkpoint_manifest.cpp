#include "mantissa/checkpoint/checkpoint_manifest.h"

#include <algorithm>

#include "mantissa/base/hash.h"
#include "mantissa/io/safetensors.h"
#include "mantissa/json/json.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

constexpr size_t kHashLine = 17;  // 16 digits and the end of line

FileDtype file_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return FileDtype::f32;
    case Dtype::bf16: return FileDtype::bf16;
    case Dtype::f64: return FileDtype::f64;
    case Dtype::i32: return FileDtype::i32;
    case Dtype::u8: return FileDtype::u8;
  }
  fail(ExitCode::internal, "a dtype without a name in files");
}

std::string piece_name(const ManifestTensor& tensor, const Box& box) {
  if (box == whole_box(tensor.shape)) return tensor.name;
  std::string ranges;
  for (size_t d = 0; d < box.size.size(); ++d) ranges += text(d == 0 ? "" : ",", box.start[d], ":", box.start[d] + box.size[d]);
  return tensor.name + "[" + ranges + "]";
}

}  // namespace

std::vector<ShardPieces> shard_pieces(const Manifest& manifest) {
  std::vector<ShardPieces> shards(manifest.shards.size());
  for (const ManifestTensor& tensor : manifest.tensors) {
    for (const Piece& piece : tensor.pieces) shards[static_cast<size_t>(piece.shard)].push_back({&tensor, &piece});
  }
  return shards;
}

ShardPieces shard_pieces(const std::vector<ManifestTensor>& tensors) {
  ShardPieces pieces;
  for (const ManifestTensor& tensor : tensors) {
    for (const Piece& piece : tensor.pieces) pieces.push_back({&tensor, &piece});
  }
  return pieces;
}

std::string shard_header(ShardPieces pieces) {
  std::ranges::sort(pieces, {}, [](const ShardPiece& piece) { return piece.piece->offset; });
  std::vector<SafetensorsTensor> tensors;
  tensors.reserve(pieces.size());
  for (const auto& [tensor, piece] : pieces)
    tensors.push_back({.name = piece_name(*tensor, piece->box), .dtype = file_dtype(tensor->dtype), .shape = piece->box.size});
  return format_safetensors_header(tensors, {});
}

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
  const Json root = parse_json(body, source);
  const JsonReader reader(root, source);
  const auto version = reader.at("format_version").as<int64_t>();
  require(version == Manifest::kFormatVersion, ExitCode::data, source, ": format version ", version, ", this program reads version ",
          Manifest::kFormatVersion, "; export it with the program that wrote it, and start from that by checkpoint.init_from");
  Manifest manifest = reader.as<Manifest>({}, UnknownNames::refused);
  check_manifest(manifest, source, ExitCode::data);
  return manifest;
}

std::string manifest_hash(std::string_view content) { return std::string(content.substr(content.size() - kHashLine, kHashLine - 1)); }

}  // namespace mantissa
