// Blocks of every type against values that gguf-py's NumPy code decoded (scripts/interop/ggml_blocks.py), bit by bit.
#include "io/ggml_blocks.h"

#include <gmock/gmock.h>

#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

#include "files.h"
#include "mantissa/formats/element.h"

namespace mantissa::test::ggml_blocks_test {

std::vector<std::byte> bytes_of(const std::string& hex) {
  std::vector<std::byte> out;
  for (size_t i = 0; i < hex.size(); i += 2) out.push_back(static_cast<std::byte>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  return out;
}

nlohmann::json golden() { return nlohmann::json::parse(read_file(MANTISSA_SOURCE_DIR "/tests/io/ggml_blocks.json")); }

TEST(GgmlBlocks, ValuesAreThoseOfGgufPy) {
  const nlohmann::json types = golden();
  EXPECT_EQ(types.size(), 12U);
  for (const auto& [name, vectors] : types.items()) {
    SCOPED_TRACE(name);
    const auto type = static_cast<GgmlType>(vectors.at("type").get<uint32_t>());
    EXPECT_STREQ(ggml_type_info(type).name, name.c_str());
    const std::vector<std::byte> blocks = bytes_of(vectors.at("blocks"));
    const std::vector<std::byte> wanted = bytes_of(vectors.at("values"));
    std::vector<float> values(wanted.size() / sizeof(float));
    decode_ggml(type, blocks, values);
    ASSERT_GE(values.size(), 64U);
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, wanted.data() + i * sizeof bits, sizeof bits);
      ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), bits) << i;
    }
  }
}

TEST(GgmlBlocks, CodesOfMxfp4HaveTheValuesOfTheirBlocks) {
  const std::vector<std::byte> blocks = bytes_of(golden().at("MXFP4").at("blocks"));
  const size_t count = blocks.size() / 17;
  std::vector<std::byte> codes(16 * count), scales(count), alone(16 * count);
  std::vector<float> values(32 * count);
  split_mxfp4(blocks, codes, scales);
  split_mxfp4(blocks, alone, {});
  EXPECT_EQ(codes, alone);
  decode_ggml(GgmlType::mxfp4, blocks, values);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto byte = std::to_integer<uint8_t>(codes[i / 2]), code = static_cast<uint8_t>(i % 2 == 0 ? byte & 0xF : byte >> 4);
    const auto scale = std::to_integer<uint8_t>(scales[i / 32]);
    if (scale == 255) continue;  // NaN there; ggml has no NaN
    EXPECT_EQ(std::bit_cast<float>(E2M1::decode(code, scale)), values[i]) << i;
  }
}

TEST(GgmlBlocks, PartsOfBlocksAreNotDecoded) {
  std::vector<float> values(32);
  const std::vector<std::byte> blocks(33);
  EXPECT_EQ(error_of([&] { decode_ggml(GgmlType::q8_0, blocks, values); }).code(), ExitCode::internal);
  EXPECT_EQ(error_of([&] { decode_ggml(GgmlType::f32, blocks, values); }).code(), ExitCode::internal);
}

}  // namespace mantissa::test::ggml_blocks_test
