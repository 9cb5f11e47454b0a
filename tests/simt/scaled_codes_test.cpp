// Codes of packs by multiplication against the integers that define them. tests/gpu/formats_sweep.cu has the same on a chip.
#include "backend/cuda/codes/scaled_codes.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace mantissa::scaled_codes_test {

using namespace gpu;

template <class E>
class ScaledCodes : public ::testing::Test {};
using Elements = ::testing::Types<E4M3, E5M2, E2M1>;
TYPED_TEST_SUITE(ScaledCodes, Elements);

// Codes of a pack differ.
TYPED_TEST(ScaledCodes, DecodeAsTheirDefinition) {
  using E = TypeParam;
  for (uint32_t code = 0; code < 2 * E::sign_bit; ++code) {
    PackOfCodes<E> codes{};
    bool nonfinite = false, nonzero = false;
    for (unsigned i = 0; i < kPack; ++i) {
      codes.put(i, (code + i * 3) % (2 * E::sign_bit));
      nonfinite = nonfinite || (codes.at(i) & E::magnitude_mask) > E::max_code;
      nonzero = nonzero || (codes.at(i) & E::magnitude_mask) != 0;
    }
    ASSERT_EQ(nonfinite_bits(codes) != 0, nonfinite) << code;
    ASSERT_EQ(any_nonzero(codes), nonzero) << code;
    const Pack found = elements_of(codes);
    for (uint32_t scale = 0; scale < 256; ++scale) {
      const bool extreme = extreme_scale<E>(static_cast<uint8_t>(scale));
      ASSERT_EQ(scale - kLeastScale<E> > kMostScale<E> - kLeastScale<E>, extreme) << scale;
      if (extreme) continue;
      for (unsigned i = 0; i < kPack; ++i) {
        const uint32_t expected = E::decode(codes.at(i), static_cast<uint8_t>(scale)),
                       bits = std::bit_cast<uint32_t>(found.at[i] * power_of(scale));
        ASSERT_TRUE(bits == expected || (expected == kFp32Nan && found.at[i] != found.at[i])) << scale << ' ' << code;
      }
    }
  }
}

// A number and its negative, in the two halves of words.
TYPED_TEST(ScaledCodes, EncodeAsTheirDefinition) {
  using E = TypeParam;
  for (uint32_t bits = 0; bits < 1U << 15; ++bits) {
    const uint32_t x = bits << 16, exponent = bits >> 7, two = bits | x | kFp32Sign;
    for (const int offset : {-300, -12, -9, -8, -7, -4, -3, -2, -1, 0, 1, 2, 3, 6, 7, 8, 9, 10, 12, 16, 17, 18, 24, 300}) {
      const auto scale = static_cast<uint8_t>(std::clamp(static_cast<int>(exponent) + offset, 0, 255));
      if (scale == 254) continue;
      const Words words{{two, two, two, two}};
      const PackOfCodes<E> found = encoded<E>(words, factor_of<E>(scale, scale == kScaleNan));
      for (const ScaleRule rule : {ScaleRule::rceil, ScaleRule::flashinfer}) {
        const bool may_be =
            rule == ScaleRule::flashinfer ? !E::has_nan && are_ordinary(words, scale) && x != kFp32Inf : x < kFp32Inf || scale == kScaleNan;
        if (!may_be) continue;
        ASSERT_EQ(found.at(0), encode_in_block<E>(x, scale, rule)) << std::hex << x << ' ' << int{scale};
        ASSERT_EQ(found.at(7), encode_in_block<E>(x | kFp32Sign, scale, rule)) << std::hex << x << ' ' << int{scale};
      }
    }
  }
}

TYPED_TEST(ScaledCodes, HaveTheScaleOfTheirDefinition) {
  using E = TypeParam;
  for (const ScaleRule rule : {ScaleRule::rceil, ScaleRule::floor, ScaleRule::even, ScaleRule::ceil, ScaleRule::mse}) {
    for (const ScaleRange range : {ScaleRange{}, {1, 252}, {105, 254}, {0, 127}, {127, 127}}) {
      for (uint32_t amax = 0; amax < 1U << 31; amax += 0x4321) {
        for (const uint32_t x : {amax, amax & 0xffff0000U})
          ASSERT_EQ(AmaxRule::of<E>(rule, range).scale(x), (block_scale<E>(x, rule, range))) << x;
      }
    }
  }
}

// All numbers of bf16, at all scales of NVFP4 and those of tensors that come near the ends of bf16.
TEST(ScaledCodesOfNvfp4, AreTheirDefinition) {
  for (const int32_t exponent : {-kMostTensorExponent, -8, 0, 7, kMostTensorExponent}) {
    for (uint32_t amax = 0; amax <= 0x7fffU; ++amax) {
      const ScaleOfBlock found = scale_of_nvfp4(amax << 16, exponent);
      ASSERT_EQ(found.code, Nvfp4::scale(amax << 16, exponent)) << std::hex << amax;
      ASSERT_EQ(found.factor != found.factor, found.code == Nvfp4::nan_scale) << std::hex << amax;
    }
    for (uint32_t scale = 0; scale < 256; ++scale) {
      if ((scale & E4M3::magnitude_mask) == Nvfp4::nan_scale) continue;
      const float number = number_of_nvfp4(scale, exponent);
      for (const uint32_t codes : {0x76543210U, 0xfedcba98U}) {
        const Pack elements = elements_of(PackOfCodes<Nvfp4>{{codes}});
        for (unsigned i = 0; i < kPack; ++i)
          ASSERT_EQ(std::bit_cast<uint32_t>(elements.at[i] * number),
                    Nvfp4::decode(static_cast<uint8_t>(codes >> 4 * i & 15U), static_cast<uint8_t>(scale), exponent));
      }
      if (scale % 5 != 1 || scale > Nvfp4::most_scale) continue;  // all eight significands
      for (uint32_t bits = 0; bits < 0x7f80U; bits += 4) {
        const uint32_t first = bits | (bits + 1U) << 16, second = (bits + 2U) | (bits + 3U) << 16;
        const Words words{{first, second, first | 0x80008000U, second | 0x80008000U}};
        const PackOfCodes<Nvfp4> found = encoded<Nvfp4>(words, number);
        for (unsigned i = 0; i < kPack; ++i) {
          const uint32_t x = words.words[i / 2] << (i % 2 == 0 ? 16 : 0) & 0xffff0000U;
          ASSERT_EQ(found.at(i), Nvfp4::encode(x, static_cast<uint8_t>(scale), exponent)) << std::hex << x << ' ' << scale;
        }
      }
    }
  }
}

TEST(AmaxKeys, OrderTheHalvesOfWordsLikeThoseOfElements) {
  const auto check = [](ScaleRule rule, uint32_t key, uint32_t expected, uint32_t bits) {
    ASSERT_EQ(rule == ScaleRule::flashinfer ? amax_of_half<true>(key) : amax_of_half<false>(key), amax_of_key(expected)) << bits;
  };
  for (uint32_t bits = 0; bits < 1U << 16; ++bits) {
    const uint32_t two = bits | 0xC0100000U;  // beside -2.25
    for (const ScaleRule rule : {ScaleRule::rceil, ScaleRule::flashinfer}) {
      const uint32_t keys = rule == ScaleRule::flashinfer ? amax_keys<true>(two) : amax_keys<false>(two);
      check(rule, keys & 0xffffU, amax_key(bits << 16, rule), bits);
      check(rule, keys >> 16, amax_key(two & 0xffff0000U, rule), bits);
      check(rule, std::max(keys & 0xffffU, keys >> 16), std::max(amax_key(bits << 16, rule), amax_key(0xC0100000U, rule)), bits);
    }
  }
}

}  // namespace mantissa::scaled_codes_test
