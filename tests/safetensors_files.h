// Safetensors files, written by the library or by hand, right or wrong.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "files.h"
#include "io/safetensors.h"
#include "testing.h"

namespace mantissa::test {

// The bytes of a file with `length` in front of the header; by default that is the header's own.
inline std::string safetensors_bytes_of(std::string_view header, std::string_view buffer, uint64_t length) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(length >> (8 * i) & 0xff);
  return out.append(header).append(buffer);
}
inline std::string safetensors_bytes_of(std::string_view header, std::string_view buffer = "") {
  return safetensors_bytes_of(header, buffer, header.size());
}

// "NAME":{"dtype":..}
inline std::string tensor_text(std::string_view name, std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return text('"', name, R"(":{"dtype":")", dtype, R"(","shape":)", shape, R"(,"data_offsets":)", offsets, "}");
}

// Bytes that tell tensors and positions apart.
inline std::vector<std::byte> content_of(const SafetensorsTensor& tensor) {
  std::vector<std::byte> bytes(static_cast<size_t>(safetensors_bytes(tensor)));
  size_t seed = std::hash<std::string>()(tensor.name);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 56);
  return bytes;
}

// Writes in chunks of at most `chunk` bytes, by so many writers.
inline void write_model(const std::string& folder, const std::vector<SafetensorsTensor>& tensors, const SafetensorsMetadata& metadata = {},
                        int64_t shard_bytes = SafetensorsLayout::kShardBytes, size_t chunk = 7, int parts = 1) {
  const SafetensorsLayout layout(tensors, metadata, shard_bytes);
  layout.create(folder);
  for (int part = parts; part-- > 0;) {
    const size_t first = layout.first_of(part, parts), last = layout.first_of(part + 1, parts);
    SafetensorsWriter writer(folder, layout, first, last);
    for (size_t i = first; i < last; ++i) {
      const std::vector<std::byte> bytes = content_of(layout.tensors()[i]);
      for (size_t at = 0; at < bytes.size(); at += chunk) writer.write(std::span(bytes).subspan(at, std::min(chunk, bytes.size() - at)));
    }
    writer.finish();
  }
}

inline void expect_content(SafetensorsFolder& folder, const SafetensorsTensor& tensor) {
  const SafetensorsEntry* const entry = folder.find(tensor.name);
  ASSERT_NE(entry, nullptr) << tensor.name;
  EXPECT_EQ(entry->dtype, tensor.dtype);
  EXPECT_EQ(entry->shape, tensor.shape);
  std::vector<std::byte> bytes(static_cast<size_t>(entry->bytes()));
  folder.read(*entry, 0, bytes);
  EXPECT_TRUE(same_elements(bytes, content_of(tensor))) << tensor.name;
}

inline std::vector<SafetensorsTensor> one_of_each_dtype() {
  std::vector<SafetensorsTensor> tensors;
  for (int i = 0; i < kFileDtypes; ++i) {
    const auto dtype = static_cast<FileDtype>(i);
    tensors.push_back({text("of.", dtype), dtype, {3, 8}});
  }
  return tensors;
}

inline std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

class Safetensors : public ::testing::Test {
 protected:
  TemporaryFolder folder_;
  std::string folder() const { return folder_.path().string(); }
};

}  // namespace mantissa::test
