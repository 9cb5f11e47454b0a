#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "mantissa/base/integers.h"
#include "mantissa/base/printable.h"
#include "mantissa/base/utf8.h"
#include "mantissa/checkpoint/checkpoint_manifest.h"
#include "mantissa/io/plain_file_name.h"
#include "mantissa/io/safetensors.h"

namespace mantissa {
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
      check_shard(shard);
      check(files.insert(shard.file).second, "two shards are called ", shard.file);
    }
    for (const ManifestTensor& tensor : manifest_.tensors) {
      check(!tensor.name.empty() && tensor.name.size() <= Manifest::kMaxNameBytes, "a tensor name has ", tensor.name.size(), " bytes");
      check(is_utf8(tensor.name), "a tensor has a name that is no UTF-8");
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

  void check_shard(const Shard& shard) const {
    check(shard.chunk_bytes > 0 && shard.chunk_bytes <= Manifest::kMaxChunkBytes, shard.file, ": chunks of ", shard.chunk_bytes, " bytes");
    const int64_t chunks = ceil_div(shard.bytes, shard.chunk_bytes);
    check(shard.bytes >= 0 && std::cmp_equal(shard.hashes.size(), chunks), shard.file, ": ", shard.bytes, " bytes need ", chunks,
          " chunk hashes, found ", shard.hashes.size());
  }

  int64_t checked_elements(const std::vector<int64_t>& sizes, const ManifestTensor& tensor) const {
    int64_t elements = 1, bytes = 0;
    for (const int64_t size : sizes)
      if (size < 0 || __builtin_mul_overflow(elements, size, &elements))
        fail(code_, source_, ": ", tensor.name, ": the size ", shape_text(sizes), " is not possible");
    check(!__builtin_mul_overflow(elements, dtype_bytes(tensor.dtype), &bytes), tensor.name, ": too many bytes");
    return elements;
  }

  void check_tensor(const ManifestTensor& tensor) {
    check(tensor.shape.size() <= Shape::kMaxRank, tensor.name, ": ", tensor.shape.size(), " dimensions, at most ", Shape::kMaxRank);
    check(tensor.pieces.size() <= Manifest::kMaxPieces, tensor.name, ": ", tensor.pieces.size(), " pieces, at most ", Manifest::kMaxPieces);
    const int64_t elements = checked_elements(tensor.shape, tensor);
    int64_t covered = 0;
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
          ": a piece has another rank than the tensor");
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

  static bool overlap(const Box& a, const Box& b) {
    for (size_t d = 0; d < a.size.size(); ++d)
      if (a.start[d] >= b.start[d] + b.size[d] || b.start[d] >= a.start[d] + a.size[d]) return false;
    return true;
  }

  // Sorted by the first coordinate, a box is compared only with those that begin before it ends.
  void check_disjoint(const ManifestTensor& tensor) const {
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
  static constexpr int64_t kEntryBytes = 512;  // of a header, beside the name: box, shape and offsets

  std::vector<std::vector<ByteRange>> used_;  // per shard, by the pieces
  std::vector<int64_t> header_bytes_;         // per shard, at most
};

}  // namespace

void check_manifest(const Manifest& manifest, const std::string& source, ExitCode code) { ManifestChecker(manifest, source, code).check(); }

}  // namespace mantissa
