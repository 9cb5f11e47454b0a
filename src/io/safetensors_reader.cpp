#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "mantissa/base/printable.h"
#include "mantissa/io/safetensors.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

SafetensorsHeader read_header(const File& file, int64_t file_bytes) {
  const std::string source = file.path().string();
  std::array<std::byte, 8> front{};
  const auto size = static_cast<int64_t>(front.size());
  require(file_bytes >= size, ExitCode::data, source, ": byte ", file_bytes, ": ends within the length of its header");
  file.read_at(0, front);
  uint64_t length = 0;
  for (size_t i = front.size(); i-- > 0;) length = length << 8 | std::to_integer<uint64_t>(front[i]);
  require(length <= SafetensorsLimits::kHeaderBytes, ExitCode::data, source, ": byte 0: a header of ", length, " bytes, at most ",
          SafetensorsLimits::kHeaderBytes, " are accepted");
  require(std::cmp_less_equal(length, file_bytes - size), ExitCode::data, source, ": byte 0: a header of ", length, " bytes in a file of ",
          file_bytes);
  std::string content(static_cast<size_t>(length), '\0');
  file.read_at(size, std::as_writable_bytes(std::span(content)));
  return parse_safetensors_header(content, file_bytes, source);
}

const SafetensorsEntry* find_by_name(const std::vector<SafetensorsEntry>& entries, std::string_view name) {
  const auto found = std::lower_bound(entries.begin(), entries.end(), name, [](const auto& entry, auto what) { return entry.name < what; });
  return found != entries.end() && found->name == name ? &*found : nullptr;
}

void read_part(const File& file, const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) {
  require(offset >= 0 && offset <= entry.bytes() && std::cmp_less_equal(out.size(), entry.bytes() - offset), entry.name, ": ", out.size(),
          " bytes from byte ", offset, " of ", entry.bytes());
  file.read_at(entry.begin + offset, out);
}

// Returns whether there is something of this name, even a broken link.
bool is_there(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  require(!error || status.type() == fs::file_type::not_found, path_failure(error.value()), path.string(),
          ": cannot be looked at: ", error.message());
  return fs::exists(status);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const fs::path& path)
    : file_(File::open_input(path)), bytes_(file_.size()), header_(read_header(file_, bytes_)) {}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const { return find_by_name(entries(), name); }

void SafetensorsFile::read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) const {
  read_part(file_, entry, offset, out);
}

SafetensorsFolder::SafetensorsFolder(const fs::path& folder) {
  const fs::path single = folder / "model.safetensors", index = folder / "model.safetensors.index.json";
  seen_.look_at(single);
  seen_.look_at(index);
  const bool has_single = is_there(single), has_index = is_there(index);
  require(has_single || has_index, ExitCode::usage, folder.string(), ": has neither model.safetensors nor model.safetensors.index.json");
  require(!has_single || !has_index, ExitCode::usage, folder.string(),
          ": has both model.safetensors and model.safetensors.index.json; remove the one that is not the model");
  if (has_single) {
    add_file(single);
    return;
  }
  const std::string source = index.string();
  const auto weight_map = parse_safetensors_index(File::open_input(index).content(SafetensorsLimits::kHeaderBytes), source);
  std::set<std::string> names;
  for (const auto& [tensor, file] : weight_map) names.insert(file);
  for (const std::string& name : names) {
    require(is_there(folder / name), ExitCode::data, source, ": weight_map names the file ", name, ", which is not beside it");
    add_file(folder / name);
  }
  require_as_indexed(weight_map, source);
}

void SafetensorsFolder::add_file(const fs::path& path) {
  seen_.look_at(path);
  SafetensorsFile file(path);
  seen_.look_at(path);
  std::vector<SafetensorsEntry>& added = file.header_.entries;
  require(entries_.size() + added.size() <= SafetensorsLimits::kTensors, ExitCode::data, path.string(),
          ": with the files before it more than ", SafetensorsLimits::kTensors, " tensors");
  for (SafetensorsEntry& entry : added) entry.file = static_cast<int32_t>(files_.size());
  const auto middle = static_cast<std::ptrdiff_t>(entries_.size());
  std::move(added.begin(), added.end(), std::back_inserter(entries_));
  std::inplace_merge(entries_.begin(), entries_.begin() + middle, entries_.end(),
                     [](const SafetensorsEntry& a, const SafetensorsEntry& b) { return a.name < b.name; });
  files_.push_back(path);
}

void SafetensorsFolder::require_as_indexed(const std::map<std::string, std::string>& weight_map, const std::string& index) const {
  for (const SafetensorsEntry& entry : entries_) {
    const std::string& file = files_[static_cast<size_t>(entry.file)].native();
    const auto mapped = weight_map.find(entry.name);
    require(mapped != weight_map.end(), ExitCode::data, file, ": byte ", entry.begin, ": tensor \"", shortened(entry.name),
            "\" is not in the weight_map of ", index);
    require(files_[static_cast<size_t>(entry.file)].filename() == mapped->second, ExitCode::data, file, ": byte ", entry.begin,
            ": tensor \"", shortened(entry.name), "\" belongs into ", mapped->second, ", says the weight_map of ", index);
  }
  for (const auto& [name, file] : weight_map)
    require(find(name) != nullptr, ExitCode::data, index, ": weight_map has a tensor \"", printable(shortened(name)), "\", which ", file,
            " has not");
}

const SafetensorsEntry* SafetensorsFolder::find(std::string_view name) const { return find_by_name(entries_, name); }

void SafetensorsFolder::read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> out) {
  if (open_file_ != entry.file) {
    const auto file = static_cast<size_t>(entry.file);
    open_file_ = -1;
    open_ = File::open_input(files_.at(file));
    seen_.look_at(files_[file]);
    open_file_ = entry.file;
  }
  read_part(open_, entry, offset, out);
}

}  // namespace mantissa
