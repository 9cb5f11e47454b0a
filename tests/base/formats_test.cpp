// The codecs of formats/ against the slow reference and against what is published about the formats.
#include <gtest/gtest.h>

#include <array>

#include "mantissa/base/rng.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/formats/with_element.h"
#include "slow_formats.h"

namespace mantissa::formats_test {

using test::kInf, test::kNan, test::slow, test::SlowFormat, test::value_of_bits;

constexpr std::array kFormats{Format::e4m3, Format::e5m2, Format::e2m1};
constexpr auto& kRules = test::kAllRules;

uint32_t bits_of(double value) { return test::fp32_bits(value); }
bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFU) > 0x7F800000U; }

// Calls check(element type, its slow twin) for every format.
template <class Check>
void for_each_format(Check&& check) {
  for (const Format format : kFormats) with_element(format, [&]<class E>() { check(E{}, slow(format)); });
}

TEST(Element, FactsOfTheFormatsFollowFromBitsAndLargestCode) {
  using Facts = std::array<int64_t, 7>;
  const auto facts = []<class E>(E) {
    return Facts{E::bias, E::emax, E::max_fraction, E::nan_code, E::poison_code, E::has_inf ? 1 : 0, E::codes_per_byte};
  };
  EXPECT_EQ(facts(E4M3{}), (Facts{7, 8, 0x600000, 0x7F, 0x7F, 0, 1}));
  EXPECT_EQ(facts(E5M2{}), (Facts{15, 15, 0x600000, 0x7F, 0x7F, 1, 1}));
  EXPECT_EQ(facts(E2M1{}), (Facts{1, 2, 0x400000, 7, 0, 0, 2}));
}

TEST(Element, EveryCodeAtEveryScaleDecodesToItsValueRoundedOnce) {
  for_each_format([](auto element, const SlowFormat& reference) {
    using E = decltype(element);
    for (uint32_t i = 0; i < 2 * E::sign_bit * 256; ++i) {
      const auto code = static_cast<uint8_t>(i >> 8), scale = static_cast<uint8_t>(i);
      const double value = test::slow_value(reference, code, scale);
      ASSERT_EQ(E::decode(code, scale), std::isnan(value) ? 0x7FC00000U : bits_of(value)) << int(code) << " at " << int(scale);
      ASSERT_EQ(E::decode_bf16(code, scale), test::slow_bf16(value)) << int(code) << " at " << int(scale);
    }
  });
}

// Scale codes at which every finite element is exact.
template <class Exact>
std::pair<int, int> exact_scales(Exact&& exact) {
  int first = 255, last = -1;
  for (int scale = 0; scale < 255; ++scale) {
    if (exact(scale)) {
      first = std::min(first, scale), last = std::max(last, scale);
    } else {
      EXPECT_FALSE(first < scale && scale < last);
    }
  }
  return {first, last};
}

TEST(Element, AllCodesAreExactInBf16AndFp32BetweenTheseScales) {
  using Range = std::pair<int, int>;
  const std::array<Range, 3> bf16{Range{3, 246}, {10, 239}, {0, 252}}, fp32{Range{0, 246}, {0, 239}, {0, 252}};
  const std::array<Range, 3> normal{Range{10, 246}, {17, 239}, {2, 252}};  // not extreme
  for_each_format([&](auto element, const SlowFormat& reference) {
    using E = decltype(element);
    const auto all_codes = [&](int scale, auto&& holds) {
      for (uint32_t code = 0; code <= E::max_code; ++code) {
        if (!holds(static_cast<uint8_t>(code), test::slow_value(reference, static_cast<uint8_t>(code), static_cast<uint8_t>(scale))))
          return false;
      }
      return true;
    };
    const auto s = [](int scale) { return static_cast<uint8_t>(scale); };
    const auto in_bf16 = [&](int scale) {
      return all_codes(scale, [&](uint8_t c, double v) { return value_of_bits(uint32_t{E::decode_bf16(c, s(scale))} << 16) == v; });
    };
    const auto in_fp32 = [&](int scale) {
      return all_codes(scale, [&](uint8_t c, double v) { return value_of_bits(E::decode(c, s(scale))) == v; });
    };
    const auto tame = [&](int scale) {
      return all_codes(scale, [](uint8_t, double v) { return v == 0 || (v >= 0x1p-126 && v < 0x1p128); });
    };
    const auto which = static_cast<size_t>(reference.format) - 1;
    EXPECT_EQ(exact_scales(in_bf16), bf16[which]);
    EXPECT_EQ(exact_scales(in_fp32), fp32[which]);
    EXPECT_EQ(exact_scales(tame), normal[which]);
    EXPECT_EQ(exact_scales([&](int scale) { return !extreme_scale<E>(s(scale)); }), normal[which]);
  });
}

TEST(Element, EveryBf16IsRoundedToTheNearestElementAtEveryScale) {
  for_each_format([](auto element, const SlowFormat& reference) {
    using E = decltype(element);
    for (uint32_t x = 0; x < 0x10000; ++x) {
      const double value = value_of_bits(x << 16);
      for (int scale = 0; scale < 255; ++scale) {
        const uint8_t expected = test::slow_nearest(reference, std::ldexp(value, 127 - scale));
        ASSERT_EQ(E::encode(x << 16, static_cast<uint8_t>(scale)), expected) << std::hex << x << std::dec << " at " << scale;
      }
    }
  });
}

TEST(Element, TiesGoToTheEvenCodeAndOneUlpBesideToTheNearer) {
  for_each_format([](auto element, const SlowFormat& reference) {
    using E = decltype(element);
    for (size_t code = 0; code < E::max_code; ++code) {
      for (const int scale : {100, 127, 160}) {
        const double tie = std::ldexp((reference.magnitudes[code] + reference.magnitudes[code + 1]) / 2, scale - 127);
        for (const uint32_t sign : {0U, 0x80000000U}) {
          const auto encoded = [&](uint32_t bits) { return E::encode(bits | sign, static_cast<uint8_t>(scale)) & E::magnitude_mask; };
          EXPECT_EQ(encoded(bits_of(tie)), code + code % 2);
          for (const uint32_t ulp : {1U, 0x10000U}) {  // ulps of fp32, of bf16
            EXPECT_EQ(encoded(bits_of(tie) - ulp), code);
            EXPECT_EQ(encoded(bits_of(tie) + ulp), code + 1);
          }
        }
      }
    }
  });
}

TEST(Element, NonFiniteInputsSaturateOrBecomeNanWithoutASign) {
  for (const uint8_t scale : {uint8_t{0}, uint8_t{127}, uint8_t{254}}) {
    for (const uint32_t nan : {0x7F800001U, 0x7FFFFFFFU, 0xFF800001U, 0xFFC00000U}) {
      EXPECT_EQ(E4M3::encode(nan, scale), 0x7F);
      EXPECT_EQ(E5M2::encode(nan, scale), 0x7F);
      EXPECT_EQ(E2M1::encode(nan, scale), 7);
    }
    EXPECT_EQ(E4M3::encode(0x7F800000U, scale), 0x7E);
    EXPECT_EQ(E5M2::encode(0x7F800000U, scale), 0x7B);
    EXPECT_EQ(E4M3::encode(0xFF800000U, scale), 0xFE);
    EXPECT_EQ(E5M2::encode(0xFF800000U, scale), 0xFB);
    EXPECT_EQ(E2M1::encode(0x7F800000U, scale), 7);
    EXPECT_EQ(E2M1::encode(0xFF800000U, scale), 15);
  }
}

TEST(Element, SubnormalFp32AreNormalizedNotFlushed) {
  for_each_format([](auto element, const SlowFormat& reference) {
    using E = decltype(element);
    for (uint32_t i = 0; i < (1U << 23); i += i < 4096 ? 1 : 977) {
      for (const uint8_t scale : {uint8_t{0}, uint8_t{1}, uint8_t{5}, uint8_t{14}}) {
        ASSERT_EQ(E::encode(i, scale), test::slow_nearest(reference, std::ldexp(value_of_bits(i), 127 - scale)))
            << i << " at " << int(scale);
      }
    }
  });
  EXPECT_EQ(E4M3::encode(bits_of(-0x1p-133), 0), 0x88) << "2^-133 becomes 2^-6";
}

// OCP's 6-bit formats, which nothing uses: another format is no more than its three numbers.
TEST(Element, AFormatIsOneLine) {
  using E3M2 = Element<3, 2, 0x1F>;
  using E2M3 = Element<2, 3, 0x1F>;
  EXPECT_EQ(value_of_bits(E3M2::decode(0x1F, 127)), 28.0);
  EXPECT_EQ(value_of_bits(E2M3::decode(0x1F, 127)), 7.5);
  EXPECT_EQ(value_of_bits(E3M2::decode(0x01, 127)), 0.0625);
  EXPECT_EQ(value_of_bits(E2M3::decode(0x01, 127)), 0.125);
  for (uint32_t code = 0; code < 64; ++code) {
    EXPECT_EQ(E3M2::encode(E3M2::decode(static_cast<uint8_t>(code), 127), 127), code);
    EXPECT_EQ(E2M3::encode(E2M3::decode(static_cast<uint8_t>(code), 127), 127), code);
  }
  EXPECT_EQ(block_scale<E3M2>(bits_of(28), ScaleRule::rceil), 127);
  EXPECT_EQ(block_scale<E3M2>(bits_of(28.001), ScaleRule::rceil), 128);
}

TEST(Shift, IsEncodingWhatTheCodeDecodesTo) {
  for_each_format([](auto element, const SlowFormat&) {
    using E = decltype(element);
    for (uint32_t code = 0; code < 2 * E::sign_bit; ++code) {
      for (uint32_t i = 0; i < 255 * 255; ++i) {
        const auto c = static_cast<uint8_t>(code), from = static_cast<uint8_t>(i / 255), to = static_cast<uint8_t>(i % 255);
        const uint32_t value = E::decode(c, from);
        if ((value & 0x7FFFFFFFU) == 0x7F800000U && (code & E::magnitude_mask) <= E::max_code) continue;  // overflow: not finite
        ASSERT_EQ(E::shift(c, from, to), E::encode(value, to)) << code << " from " << int(from) << " to " << int(to);
      }
    }
  });
}

TEST(Shift, ChangesAValueOnlyBelowTheNormalsOfALargerScale) {
  for_each_format([](auto element, const SlowFormat& reference) {
    using E = decltype(element);
    const double normal = std::ldexp(1.0, 1 - E::bias);
    for (uint32_t code = 1; code <= E::max_code; ++code) {
      for (int shift = -20; shift <= 40; ++shift) {
        const uint8_t to = static_cast<uint8_t>(127 + shift), moved = E::shift(static_cast<uint8_t>(code), 127, to);
        const double before = reference.magnitudes[code], after = test::slow_value(reference, moved, to);
        if (before > std::ldexp(reference.max(), shift)) {
          EXPECT_EQ(moved, E::max_code) << code << " by " << shift;
        } else if (shift <= 0 || before >= std::ldexp(normal, shift)) {
          EXPECT_EQ(before, after) << code << " by " << shift;
        } else {
          EXPECT_LE(std::abs(before - after), std::ldexp(normal, shift - E::mantissa_bits - 1)) << code << " by " << shift;
        }
      }
    }
  });
  EXPECT_EQ(E4M3::shift(0x77, 128, 127), 0x7E) << "240 one binade up would be the code of NaN";
  EXPECT_EQ(shift_in_block<E4M3>(0x30, 127, 255), 0x7F);
  EXPECT_EQ(shift_in_block<E2M1>(3, 127, 255), 0);
}

TEST(BlockScale, EveryBf16AmaxGivesTheScaleOfTheDefinition) {
  for_each_format([](auto element, const SlowFormat& reference) {
    for (const ScaleRule rule : kRules) {
      for (uint32_t amax = 0; amax < 0x8000; ++amax) {
        const uint8_t expected = test::slow_scale(reference, value_of_bits(amax << 16), rule);
        ASSERT_EQ(block_scale<decltype(element)>(amax << 16, rule), expected) << std::hex << amax << " rule " << static_cast<int>(rule);
      }
    }
  });
}

TEST(BlockScale, ARangeClampsWhatTheRuleSaysOfNumbers) {
  for_each_format([](auto element, const SlowFormat& reference) {
    for (const ScaleRange range : {ScaleRange{1, 252}, ScaleRange{105, 254}, ScaleRange{127, 127}, ScaleRange{0, 200}}) {
      for (const ScaleRule rule : test::kUsualRules) {
        for (uint32_t amax = 0; amax <= 0x7F81; ++amax) {
          const uint8_t whole = test::slow_scale(reference, value_of_bits(amax << 16), rule);
          const uint8_t expected = amax >= 0x7F80 ? whole : std::clamp(whole, range.least, range.most);
          ASSERT_EQ(block_scale<decltype(element)>(amax << 16, rule, range), expected) << std::hex << amax << " to " << int{range.least};
        }
      }
    }
  });
}

// Their kernels raise amax before the rule: to 1e-4 for E4M3, to 6 * 2^-126 for E2M1. Transformer Engine clamps the exponent.
TEST(BlockScale, TheRangesOfTheDocumentationAreTheClampsThatTheyStandFor) {
  const auto raised = [](uint32_t amax, double least) { return std::max(amax, bits_of(static_cast<float>(least))); };
  for (uint32_t amax = 0; amax < 0x7F800000U; amax += 0x1001) {
    ASSERT_EQ(block_scale<E4M3>(amax, ScaleRule::rceil, {105, 254}), block_scale<E4M3>(raised(amax, 1e-4), ScaleRule::rceil)) << amax;
    ASSERT_EQ(block_scale<E2M1>(amax, ScaleRule::rceil, {1, 254}), block_scale<E2M1>(raised(amax, 6 * 0x1p-126), ScaleRule::rceil)) << amax;
  }
}

// The threshold under even is at 1.75, 1.875 and 1.9375, under ceil just above powers of two.
TEST(BlockScale, EveryBinadeOfFp32TurnsAtTheThreshold) {
  for_each_format([](auto element, const SlowFormat& reference) {
    for (uint32_t exponent = 0; exponent <= 255; ++exponent) {
      for (const uint32_t fraction : {0U, 1U, 0x3FFFFFU, 0x400000U, 0x400001U, 0x5FFFFFU, 0x600000U, 0x600001U, 0x6FFFFFU, 0x700000U,
                                      0x77FFFFU, 0x780000U, 0x7FFFFFU}) {
        const uint32_t amax = exponent << 23 | fraction;
        for (const ScaleRule rule : kRules) {
          EXPECT_EQ(block_scale<decltype(element)>(amax, rule), test::slow_scale(reference, value_of_bits(amax), rule)) << std::hex << amax;
        }
      }
    }
  });
}

// In fp32, amax * fp32(1 / largest element) underflows here and would give a scale one too small.
TEST(BlockScale, TheThreeInputsWhereAGemmUnderflowsAreRoundedUp) {
  const auto check = [](auto element, uint32_t amax, double largest) {
    using E = decltype(element);
    const uint8_t scale = block_scale<E>(amax, ScaleRule::rceil);
    EXPECT_LE(value_of_bits(amax), std::ldexp(largest, scale - 127)) << std::hex << amax;
    EXPECT_GT(value_of_bits(amax), std::ldexp(largest, scale - 128)) << std::hex << amax;
    EXPECT_EQ(block_scale<E>(amax - 1, ScaleRule::rceil), scale - 1) << std::hex << amax;
  };
  check(E4M3{}, 0x04600001U, 448), check(E5M2{}, 0x07E00001U, 57344), check(E2M1{}, 0x01400001U, 6);
}

TEST(BlockScale, AmaxPassesOverNanOnlyUnderFlashinfer) {
  const uint32_t nan = 0xFFC00000U, six = bits_of(-6);
  const auto amax = [](std::initializer_list<uint32_t> block, ScaleRule rule) {
    uint32_t key = 0;
    for (const uint32_t x : block) key = std::max(key, amax_key(x, rule));
    return amax_of_key(key);
  };
  EXPECT_EQ(amax({nan, six, bits_of(3)}, ScaleRule::flashinfer), bits_of(6));
  EXPECT_TRUE(is_nan(amax({nan, six}, ScaleRule::rceil)));
  EXPECT_TRUE(is_nan(amax({nan, nan}, ScaleRule::flashinfer)));
  EXPECT_EQ(amax({0, 0x80000000U}, ScaleRule::flashinfer), 0U);
  EXPECT_EQ(amax({0xFF800000U, nan}, ScaleRule::flashinfer), 0x7F800000U);
}

TEST(Swizzle, MatchesThePublishedOffsetsAndSizes) {
  EXPECT_EQ(swizzled_offset(5, 2, 5), 82);
  EXPECT_EQ(swizzled_offset(5, 5, 8), 593);
  EXPECT_EQ(swizzled_offset(40, 3, 4), 135);
  EXPECT_EQ(swizzled_offset(130, 1, 5), 1057);
  EXPECT_EQ(swizzled_bytes(130, 160 / 32), 2048) << "130x160 rowwise, and 160x130 columnwise";
  EXPECT_EQ(swizzled_bytes(128, 4), 512);
  EXPECT_EQ(swizzled_bytes(129, 4), 1024);
  EXPECT_EQ(swizzled_bytes(1, 5), 1024);
}

TEST(Swizzle, EveryScaleHasAByteOfItsOwn) {
  for (const auto& [outer, inner] : {std::pair{130, 5}, {1, 1}, {256, 8}, {300, 3}}) {
    std::vector<int> uses(static_cast<size_t>(swizzled_bytes(outer, inner)));
    for (int i = 0; i < outer; ++i)
      for (int j = 0; j < inner; ++j) uses.at(static_cast<size_t>(swizzled_offset(i, j, inner))) += 1;
    EXPECT_EQ(*std::max_element(uses.begin(), uses.end()), 1);
  }
}

TEST(Nibbles, EvenColumnsAreLow) {
  EXPECT_EQ(pack_nibbles(0x3, 0xA), 0xA3);
  EXPECT_EQ(unpack_nibble(0xA3, 0), 0x3);
  EXPECT_EQ(unpack_nibble(0xA3, 1), 0xA);
  EXPECT_EQ(unpack_nibble(0xA3, 6), 0x3);
}

}  // namespace mantissa::formats_test
