// The files of a checkpoint, as tests damage or change them.
#pragma once

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>

#include "checkpoint/checkpoint_reader.h"
#include "files.h"

namespace mantissa::test {

// Bytes of a shard before its tensors, from which offsets and hashes count.
inline int64_t header_bytes(const std::filesystem::path& shard) {
  const std::string front = read_file(shard).substr(0, 8);
  int64_t length = 0;
  for (size_t i = front.size(); i-- > 0;) length = length << 8 | static_cast<unsigned char>(front[i]);
  return length + 8;
}

// Changes what a manifest says, beside the shards.
inline void change_manifest(const std::filesystem::path& checkpoint, const std::function<void(Manifest&)>& change) {
  Manifest manifest = CheckpointReader(checkpoint).manifest();
  change(manifest);
  write_file(checkpoint / "manifest.json", format_manifest(manifest));
}

// Changes what a checkpoint of one shard holds, beside the header, and makes its hashes right again.
inline void change_shard(const std::filesystem::path& checkpoint, Manifest manifest, const std::function<void(std::string&)>& change) {
  const std::filesystem::path file = checkpoint / "shard-00000.safetensors";
  const auto header = static_cast<size_t>(header_bytes(file));
  std::string bytes = read_file(file), data = bytes.substr(header);
  change(data);
  manifest.shards.at(0).hashes = {xxh64(data)};
  write_file(file, bytes.substr(0, header) + data);
  write_file(checkpoint / "manifest.json", format_manifest(manifest));
}

// Writes another manifest for the same data, of one shard, and the header that belongs to it.
inline void write_manifest_and_header(const std::filesystem::path& checkpoint, const Manifest& manifest) {
  const std::filesystem::path file = checkpoint / "shard-00000.safetensors";
  std::string bytes = read_file(file);
  bytes.replace(0, static_cast<size_t>(header_bytes(file)), shard_header(shard_pieces(manifest).at(0)));
  write_file(file, bytes);
  write_file(checkpoint / "manifest.json", format_manifest(manifest));
}

// Changes one element of a tensor.
inline void set_element(const std::filesystem::path& checkpoint, const std::string& tensor, int64_t element, float value) {
  const CheckpointReader reader(checkpoint);
  const int64_t offset = reader.tensor(tensor).pieces.at(0).offset + element * 4;
  change_shard(checkpoint, reader.manifest(), [&](std::string& data) { std::memcpy(data.data() + offset, &value, 4); });
}

}  // namespace mantissa::test
