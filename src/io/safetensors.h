// Files in the safetensors format, one by one and as the folders that model hubs hand out: model.safetensors, or shards beside
// model.safetensors.index.json. Little-endian, row-major:
//
//   u64     N       length of the header, at most 100,000,000
//   N bytes JSON    {"__metadata__":{"format":"pt"},"NAME":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}, ...}, padded with spaces
//   rest    buffer  what the offsets count in; the tensors tile it, without hole or overlap
//
// The readers return only what was checked. A fault of a file is Error(data) that names file, byte and tensor; a file that is not there is
// Error(usage), one that the system fails to read Error(environment). The user's own links are followed: the caches of hubs are made of
// them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"

namespace mantissa {

// Checks names of files in a file that lists others beside it.

// Requires no separators and no leading dot: the name cannot leave the folder, nor mean another file than it says.
inline bool is_plain_file_name(std::string_view name) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  };
  return !name.empty() && name.size() <= 255 && name[0] != '.' && std::all_of(name.begin(), name.end(), plain);
}

// Requires that files of others stay unchanged while they are read: a model that is downloaded again or trained on would otherwise be read
// half old and half new. Files are identified by device, inode, size and times, which every replacement changes.
class UnchangedFiles {
 public:
  // Call it before and after each time that `path` is opened, also where nothing is there. Throws Error(data) if the file is not what it
  // was the first time, and Error(environment) where the system cannot tell.
  void look_at(const std::filesystem::path& path);
  // Checks all of them again: everything read so far belongs to one state of each.
  void require_unchanged();

 private:
  using State = std::array<int64_t, 7>;  // zeros for a file that is not there
  static State state_of(const std::string& path);
  std::map<std::string, State> seen_;
};

// The types in the format's own order. A file has its tensors from the last type to the first: sizes never grow, so all are aligned.
enum class FileDtype : uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64
};
inline constexpr int kFileDtypes = 22;

const char* file_dtype_name(FileDtype dtype);  // "BOOL", "F4", ..., "U64"
std::optional<FileDtype> parse_file_dtype(std::string_view name);
int file_dtype_bits(FileDtype dtype);
std::ostream& operator<<(std::ostream& out, FileDtype dtype);

struct SafetensorsTensor {
  std::string name;
  FileDtype dtype = FileDtype::f32;
  std::vector<int64_t> shape;  // [] has one element; dimensions may be 0
};

// A tensor that a reader found: its sizes are possible and its bytes inside the file.
struct SafetensorsEntry : SafetensorsTensor {
  int64_t begin = 0, end = 0;  // bytes in the file
  int32_t file = 0;            // index in SafetensorsFolder::files()

  int64_t bytes() const { return end - begin; }
};

struct SafetensorsLimits {
  static constexpr int64_t kHeaderBytes = 100'000'000;  // also the limit of an index
  static constexpr size_t kTensors = 1'000'000;         // tensors of a folder
  static constexpr size_t kRank = 8;
  static constexpr size_t kNameBytes = 1024;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // by name
  SafetensorsMetadata metadata;
};

// Parses the header of a file of `file_bytes` bytes, without its first 8. Memory is proportional to the text.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t file_bytes, const std::string& source);

// Returns the first bytes of a file, length and padding included, for tensors in this order. Throws Error(internal) for what no reader
// accepts.
std::string format_safetensors_header(std::span<const SafetensorsTensor> tensors, const SafetensorsMetadata& metadata);

// Maps tensor names to names of files beside the index, which must be plain. `source` is the index's path.
std::map<std::string, std::string> parse_safetensors_index(std::string_view json, const std::string& source);

// Reads one file, which stays open. Not for use by several threads at once.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }  // by name
  const SafetensorsMetadata& metadata() const { return header_.metadata; }
  const SafetensorsEntry* find(std::string_view name) const;  // null if there is none

  // Reads exactly out.size() bytes of the entry, from byte `offset` of it.
  void read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) const;

 private:
  friend class SafetensorsFolder;
  File file_;
  int64_t bytes_ = 0;
  SafetensorsHeader header_;
};

// A model's folder: all files that belong to it, checked when it is opened; of these one is open at a time. Every tensor of the index is in
// the file that it names, and every tensor of those files is in the index. Not for use by several threads at once.
class SafetensorsFolder {
 public:
  // Error(usage) if the folder has no model.safetensors and no model.safetensors.index.json, or both.
  explicit SafetensorsFolder(const std::filesystem::path& folder);

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // by name
  const std::vector<std::filesystem::path>& files() const { return files_; }
  const SafetensorsMetadata& metadata() const { return metadata_; }  // that of the first file
  const SafetensorsEntry* find(std::string_view name) const;         // null if there is none
  // Throws Error(data) for a file that is not the one whose header was read.
  void read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out);
  // Requires that everything read so far belongs to one state of all files. Throws Error(data) that names one that was changed or replaced.
  void require_unchanged() { seen_.require_unchanged(); }

 private:
  void add_file(const std::filesystem::path& path);

  std::vector<std::filesystem::path> files_;
  SafetensorsMetadata metadata_;
  UnchangedFiles seen_;
  std::vector<SafetensorsEntry> entries_;
  File open_;  // files_[open_file_]
  int32_t open_file_ = -1;
};

// Sorts tensors as files have them: the last dtype first, then by name.
std::vector<SafetensorsTensor> in_file_order(std::vector<SafetensorsTensor> tensors);

// Layout of the tensors of a model in its files: model.safetensors, or shards and their index. Several processes that have the same layout
// write parts of the same files.
class SafetensorsLayout {
 public:
  static constexpr int64_t kShardBytes = 5'000'000'000;

  // A shard is full when the next tensor would take its tensors above `shard_bytes`. `metadata` goes into every file, after its
  // "format", "pt" unless it says otherwise. Throws Error(internal) for names and shapes that no reader takes.
  explicit SafetensorsLayout(std::vector<SafetensorsTensor> tensors, const SafetensorsMetadata& metadata = {},
                             int64_t shard_bytes = kShardBytes);

  struct Place {
    size_t file;
    int64_t begin, end;  // bytes in the file
  };
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }  // in file order
  const Place& place(size_t tensor) const { return places_[tensor]; }
  const std::string& file(size_t file) const { return files_[file].name; }
  int64_t bytes() const { return bytes_; }  // bytes of all tensors
  // Returns the first tensor of part number `part` of `parts`, consecutive tensors of nearly equal bytes; part `parts` begins at the end.
  size_t first_of(int part, int parts) const;

  // Makes all files in a folder that is there, with their headers, and the index, which are on the disk on return. Throws Error(storage).
  void create(const std::filesystem::path& folder) const;

 private:
  struct ShardFile {
    std::string name, header;
    int64_t bytes;  // with the header
  };

  std::vector<SafetensorsTensor> tensors_;
  std::vector<Place> places_;  // by tensor, as tensors_
  std::vector<ShardFile> files_;
  int64_t bytes_ = 0;
};

// Writes tensors [first, last) of a layout, one after the other, into the files that create() made. Throws Error(storage).
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& folder, const SafetensorsLayout& layout, size_t first,
                    size_t last);  // layout outlives this

  // Writes the next bytes of the first tensor that is incomplete. Throws Error(internal) if they are more than it lacks.
  void write(std::span<const std::byte> bytes);
  void finish();  // all of it is on the disk; throws Error(internal) if tensors are incomplete

 private:
  void begin_tensor();

  std::filesystem::path folder_;
  const SafetensorsLayout& layout_;
  size_t tensor_, last_;
  int64_t at_ = 0;  // in the file
  size_t open_ = 0;
  std::optional<File> file_;  // number open_
};

// Writes a file that is not there yet, which is on the disk on return. It has `bytes`, or those of its content: what several hosts write
// side by side lies inside it. Throws Error(storage).
void write_new_file(const std::filesystem::path& path, std::string_view content, int64_t bytes = 0);

// Returns the bytes of a tensor. Throws Error(internal) for an impossible type and shape.
int64_t safetensors_bytes(const SafetensorsTensor& tensor);

}  // namespace mantissa
