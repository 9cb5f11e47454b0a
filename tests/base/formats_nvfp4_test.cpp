// NVFP4 against its definition in fp64, where every number of it is exact.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>

#include "mantissa/base/rng.h"
#include "mantissa/formats/block_scale.h"

namespace mantissa::formats_nvfp4_test {

constexpr std::array kElements{0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
constexpr std::array kExponents{-60, -8, -2, 0, 7, 60};

double value_of(uint32_t bits) { return double{std::bit_cast<float>(bits)}; }

double scale_of_code(int code) {
  const int field = (code >> 3) & 15, fraction = code & 7;
  return field == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, field - 10);
}

// The code of the nearest of ascending numbers, of two equally near ones the even code.
template <class Numbers>
int nearest(double x, int first, int last, const Numbers& number) {
  int code = first;
  while (code < last) {
    const double midpoint = (number(code) + number(code + 1)) / 2;
    if (x < midpoint || (x == midpoint && code % 2 == 0)) break;
    ++code;
  }
  return code;
}

int slow_scale(uint32_t amax, int exponent) {  // 6 * 2^exponent * a midpoint has few digits, a sixth of amax has not
  return nearest(value_of(amax), 1, 0x7E, [=](int code) { return 6 * std::ldexp(scale_of_code(code), exponent); });
}

TEST(Nvfp4, ScalesAreNearestToASixthOfTheLargest) {
  for (const int exponent : kExponents) {
    for (uint32_t x = 0; x < 0x7F80; ++x) ASSERT_EQ(Nvfp4::scale(x << 16, exponent), slow_scale(x << 16, exponent)) << std::hex << x;
    // fp32 beside each midpoint, where a sixth rounded to fp32 would still differ.
    for (int code = 1; code < 0x7E; ++code) {
      const double midpoint = 3 * std::ldexp(scale_of_code(code) + scale_of_code(code + 1), exponent);
      const auto bits = std::bit_cast<uint32_t>(static_cast<float>(midpoint));
      for (const uint32_t near : {bits - 1, bits, bits + 1}) ASSERT_EQ(Nvfp4::scale(near, exponent), slow_scale(near, exponent)) << code;
    }
  }
  EXPECT_EQ(Nvfp4::scale(std::bit_cast<uint32_t>(6.0F), 0), 0x38) << "a scale of 1";
  EXPECT_EQ(Nvfp4::scale(0, 0), 1);
  EXPECT_EQ(Nvfp4::scale(1, -60), 1);
  for (const uint32_t amax : {kFp32Inf, kFp32Nan}) EXPECT_EQ(Nvfp4::scale(amax, 0), Nvfp4::nan_scale);
}

TEST(Nvfp4, ElementsAreNearestAndTiesGoToEvenCodes) {
  for (const int exponent : kExponents) {
    for (int scale = 1; scale <= 0x7E; scale += exponent == -8 ? 1 : 13) {
      const double whole = std::ldexp(scale_of_code(scale), exponent);
      const auto element = [=](int code) { return kElements[static_cast<size_t>(code)] * whole; };
      const auto check = [&](uint32_t bits) {
        const int expected = nearest(value_of(bits), 0, 7, element);
        ASSERT_EQ(Nvfp4::encode(bits, static_cast<uint8_t>(scale), exponent), expected) << std::hex << bits << " scale " << scale;
        ASSERT_EQ(Nvfp4::encode(bits | kFp32Sign, static_cast<uint8_t>(scale), exponent), expected + 8) << std::hex << bits;
      };
      for (uint32_t x = 0; x < 0x7F80; x += exponent == -8 ? 1 : 3) check(x << 16);
      for (int code = 0; code < 7; ++code) {
        const auto midpoint = std::bit_cast<uint32_t>(static_cast<float>((element(code) + element(code + 1)) / 2));
        for (const uint32_t near : {midpoint - 1, midpoint, midpoint + 1}) check(near);
      }
    }
  }
}

TEST(Nvfp4, ValuesAreProductsAndNumbersOfBf16) {
  for (const int exponent : kExponents) {
    for (int scale = 0; scale < 256; ++scale) {
      for (uint8_t code = 0; code < 16; ++code) {
        const uint32_t bits = Nvfp4::decode(code, static_cast<uint8_t>(scale), exponent);
        if ((scale & 0x7F) == 0x7F) {
          ASSERT_EQ(bits, kFp32Nan);
          continue;
        }
        const double element = std::copysign(kElements[code & 7U], code < 8 ? 1.0 : -1.0);
        const double expected = element * std::copysign(std::ldexp(scale_of_code(scale & 0x7F), exponent), scale < 128 ? 1.0 : -1.0);
        ASSERT_EQ(bits, std::bit_cast<uint32_t>(static_cast<float>(expected))) << int{code} << " at " << scale;
        ASSERT_EQ(bits & 0xFFFFU, 0U) << int{code} << " at " << scale;
        if (scale > 0 && scale < 128) {
          EXPECT_EQ(Nvfp4::encode(bits, static_cast<uint8_t>(scale), exponent), code) << "a second quantization";
        }
      }
    }
  }
}

// Squared error of a block with codes of this scale.
double error_of(const std::array<uint32_t, 16>& block, int scale, int exponent) {
  double sum = 0;
  for (const uint32_t x : block) {
    const uint8_t code = Nvfp4::encode(x, static_cast<uint8_t>(scale), exponent);
    sum += std::pow(value_of(x) - value_of(Nvfp4::decode(code, static_cast<uint8_t>(scale), exponent)), 2);
  }
  return sum;
}

// Values of codes that were given this scale have no error under mse.
void expect_values_stay(std::array<uint32_t, 16> block, uint8_t given, int exponent) {
  uint32_t amax = 0;
  for (uint32_t& x : block) {
    x = Nvfp4::decode(Nvfp4::encode(x, given, exponent), given, exponent);
    amax = std::max(amax, x & ~kFp32Sign);
  }
  const uint8_t again = Nvfp4::searched_scale(amax, exponent, [&](uint8_t scale) {
    int64_t sum = 0;
    for (const uint32_t x : block) sum += Nvfp4::squared_error(x, amax, scale, exponent);
    return sum;
  });
  for (const uint32_t x : block)
    ASSERT_EQ(Nvfp4::decode(Nvfp4::encode(x, again, exponent), again, exponent), x) << "scale " << int{given} << ", then " << int{again};
}

TEST(Nvfp4, TheScaleOfLeastErrorIsSearchedBesideTheNearest) {
  int below = 0, above = 0, beyond = 0;
  for (uint32_t draw = 0; draw < 3000; ++draw) {
    const int exponent = kExponents[draw % kExponents.size()];
    std::array<uint32_t, 16> block{};  // bf16 over few binades, so that nothing is cut off
    uint32_t amax = 0;
    for (size_t i = 0; i < block.size(); ++i) {
      const auto words = random_words({.seed = 3}, draw, i);
      block[i] = (static_cast<uint32_t>(119 + exponent + static_cast<int>(words[0] % 12)) << 23) | (words[1] & 0x007F0000U) |
                 (words[2] & kFp32Sign);
      amax = std::max(amax, block[i] & ~kFp32Sign);
    }
    const uint8_t found = Nvfp4::searched_scale(amax, exponent, [&](uint8_t scale) {
      int64_t sum = 0;
      for (const uint32_t x : block) sum += Nvfp4::squared_error(x, amax, scale, exponent);
      return sum;
    });
    const int near = Nvfp4::scale(amax, exponent), first = std::max(near - 1, 1);
    int last = std::min(near + 5, 0x7E);
    while (value_of(amax) < 3.5 * std::ldexp(scale_of_code(last), exponent)) --last;
    int best = first;
    for (int scale = first; scale <= last; ++scale) {
      if (error_of(block, scale, exponent) < error_of(block, best, exponent)) best = scale;
    }
    ASSERT_EQ(found, best) << "draw " << draw;
    for (const uint8_t given : {found, static_cast<uint8_t>(near)}) expect_values_stay(block, given, exponent);
    below += found<near, above += found> near, beyond += found == last;
  }
  EXPECT_GT(below, 100);
  EXPECT_GT(above, 100);
  EXPECT_GT(beyond, 20);
  EXPECT_EQ(Nvfp4::searched_scale(kFp32Inf, 0, [](uint8_t) { return int64_t{0}; }), Nvfp4::nan_scale);
  EXPECT_EQ(Nvfp4::searched_scale(0x3F800000U, 0, [](uint8_t) { return int64_t{7}; }), Nvfp4::scale(0x3F800000U, 0) - 1)
      << "the smallest of equals";
  EXPECT_EQ(Nvfp4::searched_scale(0x3A800000U, 0, [](uint8_t scale) { return int64_t{-scale}; }), 1) << "2^-10 needs no search";
}

TEST(Nvfp4, BlocksThatAreNotFiniteHoldNoNumbers) {
  const CodeRule rule{ScaleRule::nearest, -8};
  const uint8_t scale = block_scale<Nvfp4>(kFp32Inf, rule);
  EXPECT_EQ(encode_in_block<Nvfp4>(std::bit_cast<uint32_t>(1.0F), scale, rule), 0);
  EXPECT_EQ(decode_in_block<Nvfp4>(0, scale, rule), kFp32Nan);
  EXPECT_FALSE(extreme_scale<Nvfp4>(0x7E) || extreme_scale<Nvfp4>(1));
}

}  // namespace mantissa::formats_nvfp4_test
