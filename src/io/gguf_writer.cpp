#include "io/gguf_writer.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace mantissa {
namespace {

template <class T>
void append_value(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_string(std::string& out, std::string_view text) {
  append_value(out, static_cast<uint64_t>(text.size()));
  out += text;
}

int64_t aligned(int64_t bytes) { return (bytes + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment; }

}  // namespace

void GgufKeys::add(Entry entry) {
  require(std::ranges::find(entries_, entry.key, &Entry::key) == entries_.end(), entry.key, " is there twice");
  entries_.push_back(std::move(entry));
}

void GgufKeys::add_u32(std::string key, int64_t value) {
  require(std::in_range<uint32_t>(value), key, ": ", value, " does not fit");
  Entry entry{.key = std::move(key), .type = GgufType::u32, .bytes = {}};
  append_value(entry.bytes, static_cast<uint32_t>(value));
  add(std::move(entry));
}

void GgufKeys::add_f32(std::string key, double value) {
  Entry entry{.key = std::move(key), .type = GgufType::f32, .bytes = {}};
  append_value(entry.bytes, static_cast<float>(value));
  add(std::move(entry));
}

void GgufKeys::add_bool(std::string key, bool value) {
  add({.key = std::move(key), .type = GgufType::boolean, .bytes = std::string(1, value ? '\1' : '\0')});
}

void GgufKeys::add_string(std::string key, std::string_view value) {
  Entry entry{.key = std::move(key), .type = GgufType::string, .bytes = {}};
  append_string(entry.bytes, value);
  add(std::move(entry));
}

void GgufKeys::add_strings(std::string key, const std::vector<std::string>& values) {
  Entry entry{.key = std::move(key), .type = GgufType::array, .element = GgufType::string, .count = std::ssize(values), .bytes = {}};
  for (const std::string& value : values) append_string(entry.bytes, value);
  add(std::move(entry));
}

void GgufKeys::add_i32s(std::string key, const std::vector<int32_t>& values) {
  Entry entry{.key = std::move(key), .type = GgufType::array, .element = GgufType::i32, .count = std::ssize(values), .bytes = {}};
  for (const int32_t value : values) append_value(entry.bytes, value);
  add(std::move(entry));
}

void GgufKeys::add_bools(std::string key, const std::vector<bool>& values) {
  Entry entry{.key = std::move(key), .type = GgufType::array, .element = GgufType::boolean, .count = std::ssize(values), .bytes = {}};
  for (const bool value : values) entry.bytes += value ? '\1' : '\0';
  add(std::move(entry));
}

GgufLayout gguf_layout(const GgufKeys& keys, std::vector<GgufTensor> tensors) {
  GgufLayout out{.front = std::string(kGgufMagic), .tensors = std::move(tensors)};
  append_value(out.front, kGgufVersion);
  append_value(out.front, static_cast<uint64_t>(out.tensors.size()));
  append_value(out.front, static_cast<uint64_t>(keys.entries().size()));
  for (const GgufKeys::Entry& entry : keys.entries()) {
    append_string(out.front, entry.key);
    append_value(out.front, static_cast<uint32_t>(entry.type));
    if (entry.type == GgufType::array) {
      append_value(out.front, static_cast<uint32_t>(entry.element));
      append_value(out.front, static_cast<uint64_t>(entry.count));
    }
    out.front += entry.bytes;
  }
  int64_t place = 0;
  for (GgufTensor& tensor : out.tensors) {
    const GgmlTypeInfo& type = ggml_type_info(tensor.type);
    require(tensor.shape.back() % type.block == 0, tensor.name, ": rows of ", tensor.shape.back(), " elements in blocks of ", type.block);
    tensor.begin = place;
    tensor.bytes = tensor.elements() / type.block * type.bytes;
    append_string(out.front, tensor.name);
    append_value(out.front, static_cast<uint32_t>(tensor.shape.size()));
    for (size_t i = tensor.shape.size(); i-- > 0;) append_value(out.front, static_cast<uint64_t>(tensor.shape[i]));
    append_value(out.front, static_cast<uint32_t>(tensor.type));
    append_value(out.front, static_cast<uint64_t>(place));
    place = aligned(place + tensor.bytes);
  }
  const int64_t front = aligned(std::ssize(out.front));
  out.front.resize(static_cast<size_t>(front), '\0');
  for (GgufTensor& tensor : out.tensors) tensor.begin += front;
  out.bytes = front + place;
  return out;
}

}  // namespace mantissa
