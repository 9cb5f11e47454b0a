// Codes of packs by multiplication against the integers that define them. tests/gpu/formats_sweep.cu has the same on a chip, over all
// inputs.
#include "backend/cuda/codes/scaled_codes.h"

#include <gtest/gtest.h>

#include <array>
#include <random>

namespace mantissa::scaled_codes_test {

using namespace gpu;

constexpr ScaleRule kRules[] = {ScaleRule::rceil, ScaleRule::flashinfer};

template <class E>
class ScaledCodes : public ::testing::Test {};
using Elements = ::testing::Types<E4M3, E5M2, E2M1>;
TYPED_TEST_SUITE(ScaledCodes, Elements);

// Scales of a pack differ, and so do codes.
TYPED_TEST(ScaledCodes, DecodeAsTheirDefinition) {
  using E = TypeParam;
  for (const ScaleRule rule : kRules) {
    for (uint32_t scale = 0; scale < 256; ++scale) {
      for (uint32_t code = 0; code < 2 * E::sign_bit; ++code) {
        PackOfCodes<E> codes;
        PackOfScales scales{0};
        for (unsigned i = 0; i < kPack; ++i) {
          codes.put(i, (code + i * 3) % (2 * E::sign_bit));
          scales.bytes |= uint64_t{(scale + i * 5) % 256} << (8 * i);
        }
        bool extreme = false, expected = false;
        const Pack found = decoded(codes, scales, rule, extreme);
        for (unsigned i = 0; i < kPack; ++i) {
          ASSERT_EQ(std::bit_cast<uint32_t>(found.at[i]), decode_in_block<E>(codes.at(i), scales.at(i), rule)) << scale << ' ' << code;
          expected = expected || ((codes.at(i) & E::magnitude_mask) != 0 && extreme_scale<E>(scales.at(i)));
        }
        ASSERT_EQ(extreme, expected);
      }
    }
  }
}

// Inputs of every exponent: the fractions beside which the code changes, and others.
std::vector<uint32_t> inputs(uint32_t exponent) {
  std::mt19937 random(exponent);
  std::vector<uint32_t> out;
  for (uint32_t step = 0; step < 32; ++step) {
    for (const uint32_t beside : {0U, 1U, 0x7fffffU}) out.push_back(exponent << 23 | ((step << 18) + beside) % (1U << 23));
    out.push_back(exponent << 23 | static_cast<uint32_t>(random()) >> 9);
  }
  return out;
}

TYPED_TEST(ScaledCodes, EncodeAsTheirDefinition) {
  using E = TypeParam;
  for (const ScaleRule rule : kRules) {
    for (uint32_t exponent = 0; exponent < 256; ++exponent) {
      for (const uint32_t x : inputs(exponent)) {
        for (const int offset : {-300, -12, -9, -8, -7, -4, -3, -2, -1, 0, 1, 2, 3, 6, 7, 8, 9, 10, 12, 16, 17, 18, 24, 300}) {
          if (x > kFp32Inf && rule != ScaleRule::flashinfer && offset < 300) continue;  // the scale of its block is 255
          const auto scale = static_cast<uint8_t>(std::clamp(static_cast<int>(exponent) + offset, 0, 255));
          Pack pack;
          for (unsigned i = 0; i < kPack; ++i) pack.at[i] = std::bit_cast<float>(i % 2 != 0 ? x | kFp32Sign : x);
          const PackOfCodes<E> found = encoded<E>(pack, PackOfScales::all(scale), rule);
          ASSERT_EQ(found.at(0), encode_in_block<E>(x, scale, rule)) << std::hex << x << ' ' << int{scale};
          ASSERT_EQ(found.at(7), encode_in_block<E>(x | kFp32Sign, scale, rule)) << std::hex << x << ' ' << int{scale};
        }
      }
    }
  }
}

}  // namespace mantissa::scaled_codes_test
