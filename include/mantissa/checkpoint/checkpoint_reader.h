// Reads one checkpoint folder. Only verified content leaves this class: the manifest is checked by its own hash and rules, the shards by
// their sizes and headers, and every byte of content by the hash of its chunk while it is read. It needs no GPU and no config.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "mantissa/base/file.h"
#include "mantissa/checkpoint/checkpoint_manifest.h"

namespace mantissa {

// Thrown if the checkpoint is torn or changed; the message names file and, where it applies, chunk. A search for a good one skips it.
class CheckpointDamage : public Error {
 public:
  explicit CheckpointDamage(const std::string& message) : Error(ExitCode::data, message) {}
};

// Thrown if the system could not read a file that may be intact: a second try may succeed.
class CheckpointUnread : public CheckpointDamage {
 public:
  using CheckpointDamage::CheckpointDamage;
};

// A reader is not for use by several threads at once.
class CheckpointReader {
 public:
  // Throws CheckpointDamage if the manifest, a header or a size is wrong, Error(usage) if there is no such folder.
  explicit CheckpointReader(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  const Manifest& manifest() const { return manifest_; }
  const std::string& hash() const { return hash_; }  // hash of the manifest, as in the file `latest`
  int64_t bytes() const { return manifest_.bytes(); }

  bool has(const std::string& name) const { return index_.contains(name); }
  // Throws Error(usage) if the checkpoint has no such tensor: it is of another model.
  const ManifestTensor& tensor(const std::string& name) const;

  // Reads a box, or the whole tensor, row-major into out, which has exactly the right number of bytes. Throws CheckpointDamage if a byte
  // that is needed cannot be trusted; out is then unspecified.
  void read(const std::string& name, const Box& box, std::span<std::byte> out);
  void read(const std::string& name, std::span<std::byte> out);

  // Reads and hashes everything, also what was read before.
  void verify();

 private:
  struct KeptChunk {
    int64_t shard, index;
    std::vector<std::byte> bytes;
  };

  void open_manifest();
  void check_shards();
  // Gives up chunks that were asked for longest ago, until one more of so many bytes may be kept.
  std::vector<std::byte> room_for_chunk(int64_t bytes);
  std::span<const std::byte> chunk(int64_t shard, int64_t index);
  void read_bytes(int64_t shard, int64_t offset, std::span<std::byte> out);
  void read_piece(const ManifestTensor& tensor, const Piece& piece, const Box& box, std::span<std::byte> out);

  std::filesystem::path directory_;
  Manifest manifest_;
  std::string hash_;
  std::unordered_map<std::string, size_t> index_;  // name -> position in manifest_.tensors
  std::vector<int64_t> header_bytes_;              // by shard
  File file_;                                      // shard number open_shard_
  int64_t open_shard_ = -1;
  std::vector<KeptChunk> kept_;  // verified, in the order in which they were last asked for
  int64_t kept_bytes_ = 0;       // bytes of all kept chunks
};

}  // namespace mantissa
