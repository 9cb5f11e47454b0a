#include "checkpoint/checkpoint_manifest.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/hash.h"
#include "io/safetensors.h"
#include "json/json_fields.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"

namespace mantissa {
// Checks manifests.

namespace {

struct ByteRange {
  int64_t begin, end;
};

class ManifestChecker {
 public:
  ManifestChecker(const Manifest& manifest, const std::string& source, ExitCode code)
      : manifest_(manifest), source_(source), code_(code), used_(manifest.shards.size()), header_bytes_(used_.size()) {}

  void check() {
    check(manifest_.step >= 0 && manifest_.samples >= 0, "step and samples must not be negative");
    check(manifest_.shards.size() <= Manifest::kMaxShards, "more than ", Manifest::kMaxShards, " shards");
    check(manifest_.tensors.size() <= Manifest::kMaxTensors, "more than ", Manifest::kMaxTensors, " tensors");
    std::unordered_set<std::string_view> files, names;
    for (const Shard& shard : manifest_.shards) {
      check(is_plain_file_name(shard.file), "the name of shard ", files.size(), " is not a plain file name");
      check(shard.chunk_bytes > 0 && shard.chunk_bytes <= Manifest::kMaxChunkBytes, shard.file, ": chunk_bytes must be 1 to ",
            Manifest::kMaxChunkBytes, ", got ", shard.chunk_bytes);
      const int64_t chunks = ceil_div(shard.bytes, shard.chunk_bytes);
      check(shard.bytes >= 0 && std::cmp_equal(shard.hashes.size(), chunks), shard.file, ": ", shard.bytes, " bytes need ", chunks,
            " chunk hashes, found ", shard.hashes.size());
      check(files.insert(shard.file).second, "two shards are called ", shard.file);
    }
    for (const ManifestTensor& tensor : manifest_.tensors) {
      check(!tensor.name.empty() && tensor.name.size() <= Manifest::kMaxNameBytes, "a tensor name has ", tensor.name.size(), " bytes");
      check(is_utf8(tensor.name), "a tensor has a name that is not UTF-8");
      check(printable(tensor.name) == tensor.name, "a tensor has a name with control characters");
      check(tensor.name.find('[') == std::string::npos && tensor.name != "__metadata__", "no tensor may be called ", tensor.name);
      check(names.insert(tensor.name).second, "two tensors are called ", tensor.name);
      check_tensor(tensor);
    }
    for (size_t i = 0; i < used_.size(); ++i) {
      check_shard_is_tiled(manifest_.shards[i], used_[i]);
      check(std::cmp_less_equal(used_[i].size(), SafetensorsLimits::kTensors) && header_bytes_[i] <= SafetensorsLimits::kHeaderBytes,
            manifest_.shards[i].file, ": more pieces than the header of a file holds");
    }
  }

 private:
  template <class... Parts>
  void check(bool ok, const Parts&... parts) const {
    require(ok, code_, source_, ": ", parts...);
  }

  void check_tensor(const ManifestTensor& tensor) {
    check(tensor.shape.size() <= Shape::kMaxRank, tensor.name, ": ", tensor.shape.size(), " dimensions, at most ", Shape::kMaxRank);
    check(tensor.pieces.size() <= Manifest::kMaxPieces, tensor.name, ": ", tensor.pieces.size(), " pieces, at most ", Manifest::kMaxPieces);
    int64_t elements = 1, bytes = 0, covered = 0;
    for (const int64_t size : tensor.shape)
      if (size < 0 || __builtin_mul_overflow(elements, size, &elements))
        fail(code_, source_, ": ", tensor.name, ": the size ", shape_text(tensor.shape), " is not possible");
    check(!__builtin_mul_overflow(elements, dtype_bytes(tensor.dtype), &bytes), tensor.name, ": too many bytes");
    for (const Piece& piece : tensor.pieces) {
      check_piece(tensor, piece);
      check(!__builtin_add_overflow(covered, piece.box.elements(), &covered), tensor.name, ": the pieces are larger than the tensor");
    }
    check(covered == elements, tensor.name, ": the pieces cover ", covered, " of ", elements, " elements");
    check_disjoint(tensor);  // with the right total, disjoint boxes inside the tensor tile it
  }

  void check_piece(const ManifestTensor& tensor, const Piece& piece) {
    const auto& [start, size] = piece.box;
    check(start.size() == tensor.shape.size() && size.size() == tensor.shape.size(), tensor.name,
          ": a piece has another number of dimensions than the tensor");
    for (size_t d = 0; d < size.size(); ++d)
      if (size[d] <= 0 || size[d] > tensor.shape[d] || start[d] < 0 || start[d] > tensor.shape[d] - size[d])
        fail(code_, source_, ": ", tensor.name, ": the piece at ", shape_text(start), " of size ", shape_text(size), " is not inside ",
             shape_text(tensor.shape));
    check(piece.shard >= 0 && std::cmp_less(piece.shard, manifest_.shards.size()), tensor.name, ": there is no shard ", piece.shard);
    const int64_t bytes = piece.box.elements() * dtype_bytes(tensor.dtype);
    const int64_t room = manifest_.shards[static_cast<size_t>(piece.shard)].bytes;
    check(bytes <= room && piece.offset >= 0 && piece.offset <= room - bytes, tensor.name, ": ", bytes, " bytes at offset ", piece.offset,
          " are not inside shard ", piece.shard);
    const auto shard = static_cast<size_t>(piece.shard);
    used_[shard].push_back({piece.offset, piece.offset + bytes});
    header_bytes_[shard] += kEntryBytes + 2 * static_cast<int64_t>(tensor.name.size());
  }

  // Sorted by the first coordinate, a box is compared only with those that begin before it ends.
  void check_disjoint(const ManifestTensor& tensor) const {
    const auto overlap = [](const Box& a, const Box& b) {
      for (size_t d = 0; d < a.size.size(); ++d)
        if (a.start[d] >= b.start[d] + b.size[d] || b.start[d] >= a.start[d] + a.size[d]) return false;
      return true;
    };
    std::vector<const Box*> boxes;
    for (const Piece& piece : tensor.pieces) boxes.push_back(&piece.box);
    std::sort(boxes.begin(), boxes.end(), [](const Box* a, const Box* b) { return a->start < b->start; });
    for (size_t i = 0; i < boxes.size(); ++i) {
      const int64_t end = boxes[i]->start.empty() ? 1 : boxes[i]->start[0] + boxes[i]->size[0];
      for (size_t j = i + 1; j < boxes.size() && (boxes[j]->start.empty() || boxes[j]->start[0] < end); ++j)
        if (overlap(*boxes[i], *boxes[j]))
          fail(code_, source_, ": ", tensor.name, ": the pieces at ", shape_text(boxes[i]->start), " and ", shape_text(boxes[j]->start),
               " overlap");
    }
  }

  void check_shard_is_tiled(const Shard& shard, std::vector<ByteRange>& ranges) const {
    std::sort(ranges.begin(), ranges.end(), [](ByteRange a, ByteRange b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (const ByteRange& range : ranges) {
      check(range.begin == end, shard.file, ": bytes ", std::min(end, range.begin), " to ", std::max(end, range.begin),
            range.begin > end ? " belong to no tensor" : " belong to two tensors");
      end = range.end;
    }
    check(end == shard.bytes, shard.file, ": bytes ", end, " to ", shard.bytes, " belong to no tensor");
  }

  const Manifest& manifest_;
  const std::string& source_;
  ExitCode code_;
  static constexpr int64_t kEntryBytes = 512;  // for each piece in a header, beside the name: box, shape and offsets

  std::vector<std::vector<ByteRange>> used_;  // per shard, by the pieces
  std::vector<int64_t> header_bytes_;         // per shard, at most
};

}  // namespace

void check_manifest(const Manifest& manifest, const std::string& source, ExitCode code) { ManifestChecker(manifest, source, code).check(); }

// Writes and reads manifests.

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

}  // namespace

std::vector<ShardPieces> shard_pieces(const Manifest& manifest) {
  std::vector<ShardPieces> shards(manifest.shards.size());
  for (const ManifestTensor& tensor : manifest.tensors) {
    for (const Piece& piece : tensor.pieces) shards[static_cast<size_t>(piece.shard)].push_back({&tensor, &piece});
  }
  return shards;
}

std::string shard_header(ShardPieces pieces) {
  std::ranges::sort(pieces, {}, [](const ShardPiece& piece) { return piece.piece->offset; });
  std::vector<SafetensorsTensor> tensors;
  tensors.reserve(pieces.size());
  for (const auto& [tensor, piece] : pieces) {
    const Box& box = piece->box;
    std::string ranges;  // where it is a part of its tensor
    for (size_t d = 0; d < box.size.size() && box.size != tensor->shape; ++d)
      ranges += text(d == 0 ? "[" : ",", box.start[d], ":", box.start[d] + box.size[d], d + 1 == box.size.size() ? "]" : "");
    tensors.push_back({.name = tensor->name + ranges, .dtype = file_dtype(tensor->dtype), .shape = box.size});
  }
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
          ": is incomplete: its last line is not its hash");
  const std::string_view body = content.substr(0, content.size() - kHashLine);
  require(Hash64::parse(manifest_hash(content)) == xxh64(body), ExitCode::data, source, ": is damaged: its hash is ", xxh64(body),
          ", but its last line is ", printable(manifest_hash(content)));
  const Json root = parse_json(body, source);
  const JsonReader reader(root, source);
  const auto version = reader.at("format_version").as<int64_t>();
  require(version == Manifest::kFormatVersion, ExitCode::data, source, ": has format version ", version,
          ", but this program reads version ", Manifest::kFormatVersion,
          "; export it with the program that wrote it, and start from that export with checkpoint.init_from");
  Manifest manifest = reader.as<Manifest>({}, UnknownNames::refused);
  check_manifest(manifest, source, ExitCode::data);
  return manifest;
}

std::string manifest_hash(std::string_view content) { return std::string(content.substr(content.size() - kHashLine, kHashLine - 1)); }

template const FieldType& detail::field_type<Manifest>();

}  // namespace mantissa
