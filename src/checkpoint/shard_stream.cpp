#include "checkpoint/chunk_hasher.h"
#include "mantissa/base/file.h"

namespace mantissa {

class ShardStream::State {
 public:
  State(const std::filesystem::path& folder, int64_t bytes) : bytes_(bytes), file_(File::create(folder / shard_name(0), bytes)) {}

  void begin(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape) {
    require_complete();
    const Box whole = whole_box(shape);
    tensors_.push_back({.name = name, .dtype = dtype, .shape = shape, .pieces = {}});
    if (whole.elements() > 0) tensors_.back().pieces.push_back({.shard = 0, .box = whole, .offset = offset_});
    end_ = offset_ + whole.elements() * dtype_bytes(dtype);
  }

  void write(std::span<const std::byte> bytes) {
    require(offset_ + static_cast<int64_t>(bytes.size()) <= end_, tensors_.empty() ? "no tensor" : tensors_.back().name,
            ": more bytes than it has");
    hasher_.update(bytes);
    file_.write_at(offset_, bytes);
    offset_ += static_cast<int64_t>(bytes.size());
  }

  ShardEntry finish() {
    require_complete();
    require(offset_ == bytes_, "a shard of ", bytes_, " bytes got ", offset_);
    file_.sync();
    file_.close();
    return {.shard = {.file = shard_name(0), .bytes = offset_, .chunk_bytes = kCheckpointChunkBytes, .hashes = hasher_.finish()},
            .tensors = std::move(tensors_)};
  }

 private:
  void require_complete() const {
    require(offset_ == end_, tensors_.empty() ? "no tensor" : tensors_.back().name, " lacks ", end_ - offset_, " bytes");
  }

  int64_t bytes_, offset_ = 0, end_ = 0;
  File file_;
  ChunkHasher hasher_;
  std::vector<ManifestTensor> tensors_;
};

ShardStream::ShardStream(const std::filesystem::path& folder, int64_t bytes) : state_(std::make_unique<State>(folder, bytes)) {}
ShardStream::~ShardStream() = default;
void ShardStream::begin(const std::string& name, Dtype dtype, const std::vector<int64_t>& shape) { state_->begin(name, dtype, shape); }
void ShardStream::write(std::span<const std::byte> bytes) { state_->write(bytes); }
ShardEntry ShardStream::finish() { return state_->finish(); }

}  // namespace mantissa
