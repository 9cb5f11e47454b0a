#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "mantissa/io/safetensors.h"

namespace mantissa {

std::vector<SafetensorsTensor> in_file_order(std::vector<SafetensorsTensor> tensors) {
  std::sort(tensors.begin(), tensors.end(),
            [](const auto& a, const auto& b) { return std::tie(b.dtype, a.name) < std::tie(a.dtype, b.name); });
  return tensors;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& folder, std::vector<SafetensorsTensor> tensors,
                                     const SafetensorsMetadata& metadata, int64_t shard_bytes)
    : folder_(folder), tensors_(in_file_order(std::move(tensors))), metadata_(metadata) {
  std::map<std::string_view, int> names;
  for (const SafetensorsTensor& tensor : tensors_) require(++names[tensor.name] == 1, "two tensors are called ", tensor.name);
  require(tensors_.size() <= SafetensorsLimits::kTensors, tensors_.size(), " tensors in one folder");
  lay_out(shard_bytes);
  begin_tensors();
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::lay_out(int64_t shard_bytes) {
  int64_t in_shard = 0, total = 0;
  shard_begin_ = {0};
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const int64_t bytes = safetensors_bytes(tensors_[i]);
    if (i > shard_begin_.back() && bytes > shard_bytes - in_shard) {
      shard_begin_.push_back(i);
      in_shard = 0;
    }
    in_shard += bytes;
    total += bytes;
  }
  shard_begin_.push_back(tensors_.size());
  require_free_space(folder_, total);
}

// Opens the files whose turn it is; files without bytes and tensors without bytes are complete at once.
void SafetensorsWriter::begin_tensors() {
  while (true) {
    const size_t shards = shard_begin_.size() - 1;
    if (files_.size() < shards && tensor_ == shard_begin_[files_.size()]) {
      if (!files_.empty()) files_.back()->sync();
      const auto own = std::span(tensors_).subspan(tensor_, shard_begin_[files_.size() + 1] - tensor_);
      const std::string header = format_safetensors_header(own, metadata_);
      files_.push_back(std::make_unique<PendingFile>(folder_ / file_name(files_.size())));
      files_.back()->append(std::as_bytes(std::span(header)));
    }
    if (tensor_ == tensors_.size()) return;
    missing_ = safetensors_bytes(tensors_[tensor_]);
    if (missing_ > 0) return;
    ++tensor_;
  }
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  require(tensor_ < tensors_.size(), bytes.size(), " bytes behind the last tensor");
  require(std::cmp_less_equal(bytes.size(), missing_), tensors_[tensor_].name, ": ", bytes.size(), " bytes, ", missing_, " are missing");
  files_.back()->append(bytes);
  missing_ -= static_cast<int64_t>(bytes.size());
  if (missing_ > 0) return;
  ++tensor_;
  begin_tensors();
}

void SafetensorsWriter::finish() {
  require(tensor_ == tensors_.size(), tensor_ < tensors_.size() ? tensors_[tensor_].name : "", ": ", missing_, " bytes are missing");
  files_.back()->sync();
  for (const auto& file : files_) file->publish();
  if (files_.size() > 1) write_file_atomically(folder_ / "model.safetensors.index.json", index());
}

std::string SafetensorsWriter::file_name(size_t shard) const {
  const size_t shards = shard_begin_.size() - 1;
  if (shards == 1) return "model.safetensors";
  const auto digits = [](size_t number) {
    std::ostringstream out;
    out << std::setw(5) << std::setfill('0') << number;
    return std::move(out).str();
  };
  return "model-" + digits(shard + 1) + "-of-" + digits(shards) + ".safetensors";
}

std::string SafetensorsWriter::index() const {
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t total = 0;
  for (size_t shard = 0; shard + 1 < shard_begin_.size(); ++shard) {
    const std::string file = file_name(shard);
    for (size_t i = shard_begin_[shard]; i < shard_begin_[shard + 1]; ++i) {
      weight_map[tensors_[i].name] = file;
      total += safetensors_bytes(tensors_[i]);
    }
  }
  return nlohmann::json{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}}.dump(2) + "\n";
}

}  // namespace mantissa
