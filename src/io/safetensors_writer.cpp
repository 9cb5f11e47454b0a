#include <algorithm>
#include <iomanip>
#include <tuple>
#include <utility>

#include "mantissa/io/safetensors.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

// The file has its whole size at once: what several hosts write side by side lies inside it.
void write_new_file(const std::filesystem::path& path, std::string_view content, int64_t bytes = 0) {
  File file = File::create(path, bytes);
  file.write_at(0, std::as_bytes(std::span(content)));
  file.sync();
  file.close();
}

std::string file_name(size_t file, size_t files) {
  if (files == 1) return "model.safetensors";
  const auto digits = [](size_t number) {
    std::ostringstream out;
    out << std::setw(5) << std::setfill('0') << number;
    return std::move(out).str();
  };
  return "model-" + digits(file + 1) + "-of-" + digits(files) + ".safetensors";
}

}  // namespace

std::vector<SafetensorsTensor> in_file_order(std::vector<SafetensorsTensor> tensors) {
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return std::tie(b.dtype, a.name) < std::tie(a.dtype, b.name); });
  return tensors;
}

SafetensorsLayout::SafetensorsLayout(std::vector<SafetensorsTensor> tensors, const SafetensorsMetadata& metadata, int64_t shard_bytes)
    : tensors_(in_file_order(std::move(tensors))) {
  std::map<std::string_view, int> names;
  for (const SafetensorsTensor& tensor : tensors_) require(++names[tensor.name] == 1, "two tensors are called ", tensor.name);
  require(tensors_.size() <= SafetensorsLimits::kTensors, tensors_.size(), " tensors in one folder");
  size_t first = 0;
  while (files_.empty() || first < tensors_.size()) {
    int64_t end = 0;
    size_t last = first;
    for (; last < tensors_.size(); ++last) {
      const int64_t bytes = safetensors_bytes(tensors_[last]);
      if (last > first && bytes > shard_bytes - end) break;
      places_.push_back({.file = files_.size(), .begin = end, .end = end + bytes});
      end += bytes;
    }
    const std::string header = format_safetensors_header(std::span(tensors_).subspan(first, last - first), metadata);
    for (size_t i = first; i < last; ++i) {
      places_[i].begin += static_cast<int64_t>(header.size());
      places_[i].end += static_cast<int64_t>(header.size());
    }
    files_.push_back({.name = {}, .header = header, .bytes = static_cast<int64_t>(header.size()) + end});
    bytes_ += end;
    first = last;
  }
  for (size_t i = 0; i < files_.size(); ++i) files_[i].name = file_name(i, files_.size());
}

size_t SafetensorsLayout::first_of(int part, int parts) const {
  if (part == parts) return tensors_.size();
  int64_t before = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const int64_t bytes = places_[i].end - places_[i].begin;
    if (before + bytes / 2 >= bytes_ / parts * part) return i;
    before += bytes;
  }
  return tensors_.size();
}

void SafetensorsLayout::create(const std::filesystem::path& folder) const {
  require_free_space(folder, bytes_);
  for (const ShardFile& file : files_) write_new_file(folder / file.name, file.header, file.bytes);
  if (files_.size() > 1) write_new_file(folder / "model.safetensors.index.json", index());
}

std::string SafetensorsLayout::index() const {
  Json weight_map = Json::Members();
  for (size_t i = 0; i < tensors_.size(); ++i) weight_map[tensors_[i].name] = file(places_[i].file);
  return Json{{"metadata", {{"total_size", bytes_}}}, {"weight_map", std::move(weight_map)}}.dump(2) + "\n";
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& folder, const SafetensorsLayout& layout, size_t first, size_t last)
    : folder_(folder), layout_(layout), tensor_(first), last_(last) {
  begin_tensor();
}

// Goes to the place of the tensor whose turn it is. Tensors without bytes are complete at once.
void SafetensorsWriter::begin_tensor() {
  while (tensor_ < last_ && layout_.place(tensor_).begin == layout_.place(tensor_).end) ++tensor_;
  if (tensor_ < last_) at_ = layout_.place(tensor_).begin;
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  require(tensor_ < last_, bytes.size(), " bytes behind the last tensor");
  const SafetensorsLayout::Place& place = layout_.place(tensor_);
  require(std::cmp_less_equal(bytes.size(), place.end - at_), layout_.tensors()[tensor_].name, ": ", bytes.size(), " bytes, ",
          place.end - at_, " are missing");
  if (file_ && open_ != place.file) file_->sync();
  if (!file_ || open_ != place.file) file_.emplace(File::open_for_writing(folder_ / layout_.file(place.file)));
  open_ = place.file;
  file_->write_at(at_, bytes);
  at_ += static_cast<int64_t>(bytes.size());
  if (at_ < place.end) return;
  ++tensor_;
  begin_tensor();
}

void SafetensorsWriter::finish() {
  if (tensor_ < last_)
    fail(ExitCode::internal, layout_.tensors()[tensor_].name, ": ", layout_.place(tensor_).end - at_, " bytes are missing");
  if (!file_) return;
  file_->sync();
  file_->close();
}

}  // namespace mantissa
