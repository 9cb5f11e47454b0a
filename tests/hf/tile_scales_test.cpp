// Scales of block FP8 as files hold them, and tests whether MXFP4 is E4M3 in tiles.
#include "hf/tile_scales.h"

#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "files.h"

namespace mantissa::tile_scales_test {

using ::testing::HasSubstr;

float scale_of(uint8_t code) { return std::ldexp(1.0F, code - 127); }

TEST(TileScales, EveryPowerOfTwoThatE8M0HasIsItsCode) {
  for (int code = 0; code < 255; ++code) EXPECT_EQ(e8m0_of_scale(scale_of(static_cast<uint8_t>(code))), code);
  for (const float other : {0.3F, 3.0F, std::ldexp(1.0F, -128), std::ldexp(3.0F, -129), 0.0F, -1.0F, std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(), std::nextafter(1.0F, 2.0F), std::numeric_limits<float>::max()})
    EXPECT_EQ(e8m0_of_scale(other), std::nullopt) << other;
}

TEST(TileScales, CodesAreTheSameNumbersInEveryType) {
  std::vector<std::byte> codes;
  for (int code = 0; code < 255; ++code) codes.push_back(static_cast<std::byte>(code));
  EXPECT_EQ(tile_scales_as(FileDtype::f8_e8m0, codes), codes);
  const std::vector<std::byte> wide = tile_scales_as(FileDtype::f32, codes), narrow = tile_scales_as(FileDtype::bf16, codes);
  ASSERT_EQ(wide.size(), 4 * codes.size());
  ASSERT_EQ(narrow.size(), 2 * codes.size());
  for (size_t i = 0; i < codes.size(); ++i) {
    float scale = 0;
    std::memcpy(&scale, wide.data() + 4 * i, sizeof scale);
    EXPECT_EQ(scale, scale_of(static_cast<uint8_t>(i)));
    uint16_t half = 0;
    std::memcpy(&half, narrow.data() + 2 * i, sizeof half);
    EXPECT_EQ(std::bit_cast<float>(static_cast<uint32_t>(half) << 16), scale);
  }
}

// A file with one tensor "s".
class ScalesInAFile : public ::testing::Test {
 protected:
  TileScales read(FileDtype dtype, const std::vector<int64_t>& shape, const std::string& bytes) const {
    const SafetensorsLayout layout({{.name = "s", .dtype = dtype, .shape = shape}});
    std::filesystem::remove(folder_ / "model.safetensors");
    layout.create(folder_.path());
    SafetensorsWriter writer(folder_.path(), layout, 0, 1);
    writer.write(std::as_bytes(std::span(bytes)));
    writer.finish();
    const SafetensorsFolder files(folder_.path());
    return read_tile_scales(std::as_bytes(std::span(bytes)), *files.find("s"), "FOLDER");
  }
  static std::string bytes_of(const std::vector<float>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
  }
  test::TemporaryFolder folder_;
};

TEST_F(ScalesInAFile, BelongToTilesFromTheFirstRowAndColumn) {
  const TileScales scales = read(FileDtype::f32, {2, 3}, bytes_of({1, 2, 4, 8, 16, 32}));
  EXPECT_EQ(scales.no_power_of_two, std::nullopt);
  EXPECT_EQ((std::vector{scales.at(0, 0), scales.at(127, 127), scales.at(127, 128), scales.at(128, 383)}),
            (std::vector{1.F, 1.F, 2.F, 32.F}));
  EXPECT_EQ(read(FileDtype::f8_e8m0, {1, 2}, std::string("\x00\x80", 2)).values, (std::vector<float>{std::ldexp(1.0F, -127), 2}));
  EXPECT_EQ(read(FileDtype::bf16, {1, 2}, std::string("\x80\x3f\x40\x40", 4)).values, (std::vector<float>{1, 3}));
  EXPECT_EQ(read(FileDtype::f32, {2, 2}, bytes_of({1, 2, 0.75F, 0.3F})).no_power_of_two, "s[1, 0] is 0.75");
}

TEST_F(ScalesInAFile, ThatAreNoScalesAreNamed) {
  for (const float bad : {0.0F, -0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const Error error = test::error_of([&] { read(FileDtype::f32, {2, 2}, bytes_of({1, 2, 4, bad})); });
    EXPECT_EQ(error.code(), ExitCode::data) << bad;
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("FOLDER: s[1, 1] is "), HasSubstr(": a scale must be positive and finite")))
        << bad;
  }
  EXPECT_EQ(test::error_of([&] { read(FileDtype::f8_e8m0, {1, 2}, "\x7f\xff"); }).code(), ExitCode::data);
}

}  // namespace mantissa::tile_scales_test
