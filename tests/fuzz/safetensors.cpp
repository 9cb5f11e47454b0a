// Accepted: all tensors inside the file, side by side; written and read again they are the same; no name of an index leaves its folder.
#include "io/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>
#include <vector>

#include "targets.h"

namespace mantissa::fuzz {
namespace {

bool same_tensor(const SafetensorsTensor& a, const SafetensorsTensor& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape;
}

void require_tiling(const std::vector<SafetensorsEntry>& entries, int64_t begin, int64_t end) {
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (const SafetensorsEntry& entry : entries) {
    promise(entry.bytes() == safetensors_bytes(entry), "a tensor has the bytes of its shape");
    parts.emplace_back(entry.begin, entry.end);
  }
  std::sort(parts.begin(), parts.end());
  for (const auto& [from, to] : parts) {
    promise(from == begin && to >= from, "tensors tile the file");
    begin = to;
  }
  promise(begin == end, "tensors end where the file does");
}

// Writes the header in the order and form of SafetensorsLayout.
void require_rewritable(SafetensorsHeader header) {
  header.metadata.erase("format");
  std::vector<SafetensorsTensor> tensors(header.entries.begin(), header.entries.end());
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return std::tie(b.dtype, a.name) < std::tie(a.dtype, b.name); });
  int64_t bytes = 0;
  for (const SafetensorsTensor& tensor : tensors) bytes += safetensors_bytes(tensor);
  const std::string front = format_safetensors_header(tensors, header.metadata);
  const auto size = static_cast<int64_t>(front.size());
  SafetensorsHeader again = parse_safetensors_header(std::string_view(front).substr(8), size + bytes, "rewritten");
  promise(again.metadata.erase("format") == 1 && again.metadata == header.metadata, "metadata is read as it was written");
  promise(std::equal(again.entries.begin(), again.entries.end(), header.entries.begin(), header.entries.end(), same_tensor),
          "tensors are read as they were written");
  require_tiling(again.entries, size, size + bytes);
}

}  // namespace

bool safetensors_header(std::string_view input) {
  const size_t buffer = take_byte(input) << 8 | take_byte(input);
  const auto begin = static_cast<int64_t>(8 + input.size()), end = begin + static_cast<int64_t>(buffer);
  SafetensorsHeader header;
  if (!accepted([&] { header = parse_safetensors_header(input, end, "header"); })) return false;
  require_tiling(header.entries, begin, end);
  require_rewritable(std::move(header));
  return true;
}

bool safetensors_file(std::string_view input) {
  const MemoryFile content(input);
  return accepted([&] {
    const SafetensorsFile file(content.path());
    std::string bytes;
    for (const SafetensorsEntry& entry : file.entries()) {
      promise(file.find(entry.name) == &entry, "a tensor is found by its name");
      bytes.assign(static_cast<size_t>(entry.bytes()), '\0');
      file.read(entry, 0, std::as_writable_bytes(std::span(bytes)));
      promise(bytes == input.substr(static_cast<size_t>(entry.begin), bytes.size()), "the bytes of a tensor are those of the file");
    }
    require_rewritable({.entries = file.entries(), .metadata = file.metadata()});
  });
}

bool safetensors_index(std::string_view input) {
  std::map<std::string, std::string> files;
  if (!accepted([&] { files = parse_safetensors_index(input, "model.safetensors.index.json"); })) return false;
  for (const auto& [tensor, file] : files) {
    promise(!file.empty() && file.front() != '.' && file.size() < 256, "a file is beside the index");
    promise(file.find_first_of(std::string_view("/\\\0\n", 4)) == std::string::npos, "a file's name is plain");
  }
  const std::string again = nlohmann::json{{"weight_map", files}}.dump();
  promise(parse_safetensors_index(again, "again") == files, "an index is read as it was written");
  return true;
}

}  // namespace mantissa::fuzz
