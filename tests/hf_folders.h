// Folders of Hugging Face's form, as another program would have written them, and what is in them byte by byte.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "architecture_configs.h"
#include "files.h"
#include "hf/hugging_face.h"
#include "io/safetensors.h"
#include "mantissa/base/rng.h"
#include "mantissa/formats/fp16.h"

namespace mantissa::test {

// A config of two layers that says no type.
inline nlohmann::json architecture_json(const std::string& type) {
  nlohmann::json config = config_of(type);
  if (type == "gpt2") return config;
  for (const char* const key : {"num_experts", "num_local_experts"})
    if (config.contains(key)) config[key] = 3;
  config.update({{"num_hidden_layers", 2}, {"tie_word_embeddings", type == "qwen3"}});
  if (type == "gpt_oss") config["sliding_window"] = 16;
  for (const char* const key : {"mlp_only_layers", "rms_norm_eps", "rope_theta", "torch_dtype"}) config.erase(key);
  return config;
}

class HfFolder {
 public:
  // Writes a folder with random values of these types in turn ("F32 BF16").
  HfFolder(const std::string& path, const std::string& type, const std::string& types, const nlohmann::json& change = {})
      : config_(architecture_json(type)) {
    if (!change.is_null()) config_.update(change);
    const ArchitectureConfig architecture = read_architecture_config(config_.dump(), "config.json");
    const std::vector<std::string> turns = split(types, ' ');
    for (const ArchitectureTensor& tensor : architecture_tensors(architecture.architecture, architecture.model))
      add(tensor.name, tensor.shape, *parse_file_dtype(turns[tensors_.size() % turns.size()]));
    write(path);
  }
  // Reads a folder that was written before.
  explicit HfFolder(const std::string& path) : text_(read_file(path + "/config.json")), config_(nlohmann::json::parse(text_)) {
    SafetensorsFolder folder{std::filesystem::path(path)};
    for (const SafetensorsEntry& entry : folder.entries()) {
      Content& tensor = tensors_[entry.name];
      tensor = {.dtype = entry.dtype, .shape = entry.shape, .bytes = std::string(static_cast<size_t>(entry.bytes()), '\0')};
      folder.read(entry, 0, std::as_writable_bytes(std::span(tensor.bytes)));
    }
  }

  std::set<std::string> names() const {
    std::set<std::string> out;
    for (const auto& [name, tensor] : tensors_) out.insert(name);
    return out;
  }
  FileDtype dtype(const std::string& name) const { return tensors_.at(name).dtype; }
  const std::vector<int64_t>& shape(const std::string& name) const { return tensors_.at(name).shape; }
  const std::string& bytes(const std::string& name) const { return tensors_.at(name).bytes; }
  std::vector<float> values(const std::string& name) const {
    const Content& tensor = tensors_.at(name);
    std::vector<float> out;
    for (size_t at = 0; at < tensor.bytes.size(); at += tensor.dtype == FileDtype::f32 ? 4 : 2) {
      uint32_t bits = 0;
      std::memcpy(&bits, tensor.bytes.data() + at, tensor.dtype == FileDtype::f32 ? 4 : 2);
      if (tensor.dtype == FileDtype::bf16) bits <<= 16;
      if (tensor.dtype == FileDtype::f16) bits = fp32_bits_from_fp16_bits(static_cast<uint16_t>(bits));
      out.push_back(std::bit_cast<float>(bits));
    }
    return out;
  }

  // Copies of this one with a change.
  HfFolder without(const std::string& name) const {
    HfFolder out = *this;
    out.tensors_.erase(name);
    return out;
  }
  HfFolder with(const std::string& name, std::vector<int64_t> shape) const {
    HfFolder out = *this;
    out.add(name, std::move(shape), FileDtype::bf16);
    return out;
  }
  HfFolder copy(const std::string& from, const std::string& to) const {
    HfFolder out = *this;
    out.tensors_[to] = tensors_.at(from);
    return out;
  }
  HfFolder as(const std::string& name, FileDtype dtype, std::vector<int64_t> shape) const {  // with the bytes as they are
    HfFolder out = *this;
    out.tensors_.at(name).dtype = dtype;
    out.tensors_.at(name).shape = std::move(shape);
    return out;
  }
  HfFolder put(const std::string& name, FileDtype dtype, std::vector<int64_t> shape, std::string bytes) const {
    HfFolder out = *this;
    out.tensors_[name] = {.dtype = dtype, .shape = std::move(shape), .bytes = std::move(bytes)};
    return out;
  }
  HfFolder flip(const std::string& name, size_t byte, char bits) const {
    HfFolder out = *this;
    out.tensors_.at(name).bytes.at(byte) ^= bits;
    return out;
  }
  HfFolder in_fp32() const {  // with the values as they are
    HfFolder out = *this;
    for (auto& [name, tensor] : out.tensors_) {
      const std::vector<float> wide = values(name);
      tensor.dtype = FileDtype::f32;
      tensor.bytes.assign(reinterpret_cast<const char*>(wide.data()), wide.size() * sizeof(float));
    }
    return out;
  }
  HfFolder poison(const std::string& name, size_t element) const {
    HfFolder out = *this;
    const uint32_t nan = 0x7FC00000;
    std::memcpy(out.tensors_.at(name).bytes.data() + element * sizeof nan, &nan, sizeof nan);
    return out;
  }

  void write(const std::string& path) const {
    std::filesystem::create_directories(path);
    std::filesystem::remove(path + "/model.safetensors");
    std::vector<SafetensorsTensor> list;
    for (const auto& [name, tensor] : tensors_) list.push_back({.name = name, .dtype = tensor.dtype, .shape = tensor.shape});
    const SafetensorsLayout layout(list);
    layout.create(path);
    SafetensorsWriter writer(path, layout, 0, list.size());
    for (const SafetensorsTensor& tensor : layout.tensors()) writer.write(std::as_bytes(std::span(tensors_.at(tensor.name).bytes)));
    writer.finish();
    write_file(path + "/config.json", text_.empty() ? config_.dump() : text_);
    if (text_.empty()) write_file(path + "/tokenizer.json", "{\"version\": \"1.0\"}   \n");
  }

 private:
  struct Content {
    FileDtype dtype;
    std::vector<int64_t> shape;
    std::string bytes;
  };

  // Adds a tensor of magnitudes that differ by 2^12, without ones in norms and zeros in biases.
  void add(const std::string& name, std::vector<int64_t> shape, FileDtype dtype) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    std::string bytes;
    std::array<uint32_t, 4> words = {};
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      if (i % 2 == 0) words = random_words({.seed = 5, .stream = RngStream::test}, static_cast<uint32_t>(tensors_.size()), i / 2);
      const uint32_t fraction = words[i % 2 * 2], exponent = words[i % 2 * 2 + 1] % 13U;
      uint32_t bits = (fraction & 0x807FFFFFU) | ((112U + exponent) << 23);
      if (dtype == FileDtype::bf16) bits >>= 16;
      if (dtype == FileDtype::f16) bits = (fraction & 0x83FFU) | ((1U + exponent) << 10);
      bytes.append(reinterpret_cast<const char*>(&bits), dtype == FileDtype::f32 ? 4 : 2);
    }
    tensors_[name] = {.dtype = dtype, .shape = std::move(shape), .bytes = std::move(bytes)};
  }

  std::string text_;  // as it was read
  nlohmann::json config_;
  std::map<std::string, Content> tensors_;
};

}  // namespace mantissa::test
