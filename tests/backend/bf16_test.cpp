#include "mantissa/formats/bf16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "backend/cpu/scalar.h"

namespace mantissa::bf16_test {

bool is_nan(uint16_t bits) { return (bits & 0x7FFFU) > 0x7F80U; }

TEST(Bf16, EveryCodeSurvivesDecodingAndEncoding) {
  for (uint32_t code = 0; code < 0x10000U; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    const float value = to_float(bf16{bits});
    if (is_nan(bits)) {
      EXPECT_TRUE(std::isnan(value)) << code;
      EXPECT_EQ(to_bf16(value).bits, bits | 0x0040U) << "quiet, sign and payload kept: " << code;
    } else {
      EXPECT_EQ(to_bf16(value).bits, bits) << code;
    }
  }
}

TEST(Bf16, RoundsToNearestAndTiesToEvenAboveEveryCode) {
  for (uint32_t code = 0; code < 0x10000U; ++code) {
    if ((code & 0x7FFFU) >= 0x7F80U) continue;  // infinities and NaN have no successor
    const uint32_t exact = code << 16;
    const auto encoded = [&](uint32_t offset) { return to_bf16(std::bit_cast<float>(exact + offset)).bits; };
    EXPECT_EQ(encoded(0x0001), code);
    EXPECT_EQ(encoded(0x7FFF), code);
    EXPECT_EQ(encoded(0x8000), code + (code & 1U)) << "a tie goes to the even code";
    EXPECT_EQ(encoded(0x8001), code + 1);
    EXPECT_EQ(encoded(0xFFFF), code + 1);
  }
}

TEST(Bf16, OverflowsToInfinityFromHalfAUnitAboveTheLargest) {
  const float largest = to_float(bf16{0x7F7F}), infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_bf16(std::nextafter(largest + 0x1p119F, 0.0F)).bits, 0x7F7F);
  EXPECT_EQ(to_bf16(largest + 0x1p119F).bits, 0x7F80) << "the tie: 0x7F7F is odd";
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(to_bf16(-infinity).bits, 0xFF80);
}

TEST(Bf16, NanStaysNanWhateverItsPayload) {
  for (const uint32_t nan : {0x7F800001U, 0x7F80FFFFU, 0x7FFFFFFFU, 0xFF800001U, 0xFFFFFFFFU, 0x7FC00000U}) {
    const uint16_t bits = bf16_bits_from_fp32_bits(nan);
    EXPECT_TRUE(is_nan(bits)) << std::hex << nan;
    EXPECT_EQ(bits >> 15, nan >> 31) << std::hex << nan;
  }
}

TEST(Bf16, SubnormalsAreRoundedNotFlushed) {
  EXPECT_EQ(to_bf16(0x1p-133F).bits, 1) << "the smallest bf16";
  EXPECT_EQ(to_bf16(0x1p-134F).bits, 0) << "a tie";
  EXPECT_EQ(to_bf16(0x1.8p-134F).bits, 1);
  EXPECT_EQ(to_bf16(-0x1p-149F).bits, 0x8000U);
}

// Rounding to fp32 first would make a tie of numbers just beside one.
TEST(Bf16, DoublesRoundOnce) {
  EXPECT_EQ(store<bf16>(1.0 + 0x1p-8).bits, 0x3F80) << "a tie";
  EXPECT_EQ(store<bf16>(1.0 + 0x1p-8 + 0x1p-40).bits, 0x3F81);
  EXPECT_EQ(store<bf16>(1.0 + 0x1.8p-7 - 0x1p-40).bits, 0x3F81);
  EXPECT_EQ(store<bf16>(1.0 + 0x1.8p-7).bits, 0x3F82) << "a tie";
  EXPECT_EQ(store<bf16>(-1.0 - 0x1p-8 - 0x1p-40).bits, 0xBF81);
  EXPECT_EQ(store<bf16>(1e300).bits, 0x7F80);
  EXPECT_EQ(store<bf16>(-std::numeric_limits<double>::infinity()).bits, 0xFF80);
  EXPECT_EQ(store<bf16>(1e-300).bits, 0);
  EXPECT_TRUE(is_nan(store<bf16>(std::nan("")).bits));
}

}  // namespace mantissa::bf16_test
