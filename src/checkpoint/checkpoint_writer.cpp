#include <algorithm>
#include <functional>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/hash.h"
#include "checkpoint/checkpoint_directory.h"
#include "io/safetensors.h"
#include "mantissa/backend/functions.h"
#include "mantissa/json/json.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {
namespace {

// Hashes the chunks of a shard, and names the shard.

// Hashes every kCheckpointChunkBytes of a stream that arrives in parts; the last chunk may be short.
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

// Calls chunk(offset in elements, bytes) for all of it, in parts of a chunk: memory of a device is copied part by part.
template <class Chunk>
void for_chunks(const CheckpointTensor& tensor, const Chunk& chunk) {
  const int64_t count = tensor.data.elements(), step = kCheckpointChunkBytes / dtype_bytes(tensor.data.dtype());
  const Tensor flat = tensor.data.view({count});
  for (int64_t begin = 0; begin < count; begin += step) chunk(begin, HostBytes(flat.slice(begin, std::min(count, begin + step))).get());
}

int64_t elements_of(const std::vector<Box>& boxes) {
  int64_t sum = 0;
  for (const Box& box : boxes) sum += box.elements();
  return sum;
}

std::vector<Box> boxes_of(const CheckpointTensor& tensor) {
  const bool whole = tensor.boxes.empty() && tensor.shape.elements() > 0;
  return whole ? std::vector<Box>{whole_box(dimensions(tensor.shape))} : tensor.boxes;
}

ManifestTensor describe_tensor(const CheckpointTensor& tensor, int64_t shard, int64_t& offset) {
  std::vector<Box> boxes = boxes_of(tensor);
  const std::string part = tensor.boxes.empty() ? "" : text(", of which its boxes have ", elements_of(boxes), " elements");
  require(tensor.data.elements() == elements_of(boxes), tensor.name, " is ", tensor.shape, part, ", but its data has ",
          tensor.data.elements(), " elements");
  ManifestTensor entry{.name = tensor.name, .dtype = tensor.data.dtype(), .shape = dimensions(tensor.shape), .pieces = {}};
  for (Box& box : boxes) {
    const int64_t bytes = box.elements() * dtype_bytes(entry.dtype);
    entry.pieces.push_back({.shard = shard, .box = std::move(box), .offset = offset});
    offset += bytes;
  }
  return entry;
}

// Returns wide elements before narrow ones, so that all are aligned in a file.
std::vector<CheckpointTensor> in_shard_order(std::vector<CheckpointTensor> tensors) {
  std::ranges::stable_sort(tensors, std::greater(), [](const CheckpointTensor& tensor) { return dtype_bytes(tensor.data.dtype()); });
  return tensors;
}

void require_finite(const CheckpointTensor& tensor, int64_t begin, std::span<const std::byte> bytes, int64_t step) {
  int64_t index = first_nonfinite(tensor.data.dtype(), bytes);
  if (index < 0) return;
  index += begin;
  int64_t global = index;  // position in the whole tensor
  for (const Box& box : boxes_of(tensor)) {
    if (index >= box.elements()) {
      index -= box.elements();
      continue;
    }
    global = 0;
    int64_t stride = 1;
    for (size_t d = box.size.size(); d-- > 0;) {
      global += (box.start[d] + index % box.size[d]) * stride;
      index /= box.size[d];
      stride *= tensor.shape[static_cast<int>(d)];
    }
    break;
  }
  fail(ExitCode::numerical, tensor.name, ": element ", global, " is NaN or Inf; step ", step, " is not saved");
}

}  // namespace

ShardEntry describe_shard(const std::vector<CheckpointTensor>& tensors, int64_t shard, int64_t step, const Progressed& progressed) {
  ShardEntry entry;
  ChunkHasher hasher;
  int64_t offset = 0;
  for (const CheckpointTensor& tensor : in_shard_order(tensors)) {
    entry.tensors.push_back(describe_tensor(tensor, shard, offset));
    for_chunks(tensor, [&](int64_t begin, std::span<const std::byte> bytes) {
      require_finite(tensor, begin, bytes, step);
      hasher.update(bytes);
      if (progressed) progressed();
    });
  }
  const std::string digits = text(shard), zeros(5 - std::min<size_t>(5, digits.size()), '0');
  entry.shard = {.file = "shard-" + zeros + digits + ".safetensors",
                 .bytes = offset,
                 .chunk_bytes = kCheckpointChunkBytes,
                 .hashes = hasher.finish()};
  return entry;
}

Manifest assemble_manifest(const CheckpointHead& head, const std::vector<ShardEntry>& shards) {
  Manifest manifest{head, Manifest::kFormatVersion, {}, {}};
  for (const Field& field : fields_of<CheckpointHead>(manifest)) {  // as the manifest returns them, so that two states can be compared
    if (field.limits.json) field.set(parse_json(std::get<std::string>(field.get()), "checkpoint " + field.name, ExitCode::internal).dump());
  }
  manifest.fingerprints.config = xxh64(manifest.config).text();
  std::unordered_map<std::string, size_t> places;
  for (const ShardEntry& entry : shards) {
    manifest.shards.push_back(entry.shard);
    for (const ManifestTensor& tensor : entry.tensors) {
      const auto [place, is_new] = places.emplace(tensor.name, manifest.tensors.size());
      if (is_new) {
        manifest.tensors.push_back(tensor);
        continue;
      }
      ManifestTensor& whole = manifest.tensors[place->second];
      require(whole.dtype == tensor.dtype && whole.shape == tensor.shape, tensor.name, " is ", tensor.dtype.text(), ' ',
              shape_text(tensor.shape), " in one shard, ", whole.dtype.text(), ' ', shape_text(whole.shape), " in another");
      whole.pieces.insert(whole.pieces.end(), tensor.pieces.begin(), tensor.pieces.end());
    }
  }
  check_manifest(manifest, "checkpoint to be saved", ExitCode::internal);
  return manifest;
}

void write_shard(const std::vector<CheckpointTensor>& tensors, const ShardEntry& entry, const std::filesystem::path& folder,
                 const Progressed& progressed) {
  ShardPieces pieces;
  for (const ManifestTensor& tensor : entry.tensors) {
    for (const Piece& piece : tensor.pieces) pieces.push_back({&tensor, &piece});
  }
  const std::string header = shard_header(std::move(pieces));
  auto offset = static_cast<int64_t>(header.size());
  File file = File::create(folder / entry.shard.file, offset + entry.shard.bytes);
  file.write_at(0, std::as_bytes(std::span(header)));
  for (const CheckpointTensor& tensor : in_shard_order(tensors)) {
    for_chunks(tensor, [&](int64_t, std::span<const std::byte> bytes) {
      file.write_at(offset, bytes);
      offset += static_cast<int64_t>(bytes.size());
      if (progressed) progressed();
    });
  }
  file.sync();
  file.close();
}

void write_manifest(const Manifest& manifest, const std::filesystem::path& folder) {
  const std::string content = format_manifest(manifest);
  require(std::cmp_less_equal(content.size(), Manifest::kMaxBytes), "checkpoint manifest of ", content.size(), " bytes");
  write_new_file(folder / "manifest.json", content);
  sync_directory(folder);
}

}  // namespace mantissa
