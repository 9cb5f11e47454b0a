#include "mantissa/io/checkpoint_writer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/base/file.h"
#include "mantissa/base/hash.h"
#include "mantissa/base/json.h"
#include "mantissa/tensor/nonfinite.h"

namespace mantissa {
namespace {

// slab(offset in elements, bytes) for all of it, in parts of a chunk: memory of a device is copied part by part.
template <class Slab>
void for_slabs(const CheckpointTensor& tensor, const Slab& slab) {
  const int64_t count = tensor.data.elements(), step = kCheckpointChunkBytes / dtype_bytes(tensor.data.dtype());
  const Tensor flat = tensor.data.view({count});
  for (int64_t begin = 0; begin < count; begin += step) slab(begin, HostBytes(flat.slice(begin, std::min(count, begin + step))).get());
}

// The hash of every kCheckpointChunkBytes of a stream that arrives in parts; the last chunk may be short.
class ChunkHasher {
 public:
  void update(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const size_t taken = std::min(bytes.size(), static_cast<size_t>(kCheckpointChunkBytes) - filled_);
      chunk_.update(bytes.first(taken));
      bytes = bytes.subspan(taken);
      filled_ += taken;
      if (filled_ == kCheckpointChunkBytes) end_chunk();
    }
  }
  std::vector<Hash64> finish() {
    if (filled_ > 0) end_chunk();
    return std::move(hashes_);
  }

 private:
  void end_chunk() {
    hashes_.push_back(chunk_.finish());
    filled_ = 0;
  }

  StreamHash chunk_;
  size_t filled_ = 0;
  std::vector<Hash64> hashes_;
};

ManifestTensor describe_tensor(const CheckpointTensor& tensor, int64_t& offset) {
  require(tensor.data.elements() == tensor.shape.elements(), tensor.name, " is ", tensor.shape, ", but its data has ",
          tensor.data.elements(), " elements");
  ManifestTensor entry{.name = tensor.name, .dtype = tensor.data.dtype(), .shape = dimensions(tensor.shape), .pieces = {}};
  std::vector<Box> boxes = tensor.boxes;
  if (boxes.empty() && tensor.shape.elements() > 0) boxes.push_back(whole_box(entry.shape));
  for (Box& box : boxes) {
    const int64_t bytes = box.elements() * dtype_bytes(entry.dtype);
    entry.pieces.push_back({.shard = 0, .box = std::move(box), .offset = offset});
    offset += bytes;
  }
  return entry;
}

void write_shard(const CheckpointContent& content, const Shard& shard, const std::filesystem::path& directory) {
  File file = File::create(directory / shard.file, shard.bytes);
  int64_t offset = 0;
  for (const CheckpointTensor& tensor : content.tensors) {
    for_slabs(tensor, [&](int64_t, std::span<const std::byte> bytes) {
      file.write_at(offset, bytes);
      offset += static_cast<int64_t>(bytes.size());
    });
  }
  file.sync();
  file.close();
}

void write_manifest(const Manifest& manifest, const std::filesystem::path& directory) {
  const std::string content = format_manifest(manifest);
  require(std::cmp_less_equal(content.size(), Manifest::kMaxBytes), "checkpoint manifest of ", content.size(), " bytes");
  File file = File::create(directory / "manifest.json");
  file.write_at(0, std::as_bytes(std::span(content)));
  file.sync();
  file.close();
}

}  // namespace

Manifest describe_checkpoint(const CheckpointContent& content) {
  Manifest manifest{content, Manifest::kFormatVersion, {}, {}};
  for (const Field& field : fields_of<CheckpointHead>(manifest)) {  // as the manifest returns them, so that two states can be compared
    if (field.limits.json)
      field.set(parse_strict_json(std::get<std::string>(field.get()), "checkpoint " + field.name, ExitCode::internal).dump());
  }
  manifest.fingerprints.config = xxh64(manifest.config).text();
  ChunkHasher hasher;
  int64_t offset = 0;
  for (const CheckpointTensor& tensor : content.tensors) {
    manifest.tensors.push_back(describe_tensor(tensor, offset));
    for_slabs(tensor, [&](int64_t, std::span<const std::byte> bytes) { hasher.update(bytes); });
  }
  manifest.shards.push_back({.file = "shard-00000.bin", .bytes = offset, .chunk_bytes = kCheckpointChunkBytes, .hashes = hasher.finish()});
  check_manifest(manifest, "checkpoint to be saved", ExitCode::internal);
  return manifest;
}

void require_finite(const CheckpointContent& content) {
  for (const CheckpointTensor& tensor : content.tensors) {
    for_slabs(tensor, [&](int64_t begin, std::span<const std::byte> bytes) {
      const int64_t index = first_nonfinite(tensor.data.dtype(), bytes);
      require(index < 0, ExitCode::numerical, tensor.name, ": element ", begin + index, " is NaN or Inf; step ", content.step,
              " is not saved");
    });
  }
}

void write_checkpoint(const CheckpointContent& content, const Manifest& manifest, const std::filesystem::path& directory) {
  make_directory(directory);
  try {
    write_shard(content, manifest.shards.front(), directory);
    write_manifest(manifest, directory);
    sync_directory(directory);
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report; a leftover is swept at the next start
    std::filesystem::remove_all(directory, ignored);
    throw;
  }
}

}  // namespace mantissa
