// Whole blocks: worked examples, non-finite and flushed blocks, and the values that a second quantization keeps.
#include <gtest/gtest.h>

#include <array>
#include <span>

#include "mantissa/base/rng.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/with_element.h"
#include "slow_formats.h"

namespace mantissa::formats_block_test {

using test::kInf, test::kNan, test::slow, test::value_of_bits;

using Block = std::array<uint32_t, 32>;  // fp32 bits

struct Quantized {
  uint8_t scale = 0;
  std::array<uint8_t, 32> codes{};
  bool operator==(const Quantized&) const = default;
};

template <class E>
uint8_t scale_of(std::span<const uint32_t> block, ScaleRule rule) {
  uint32_t key = 0;
  for (const uint32_t x : block) key = std::max(key, amax_key(x, rule));
  const uint32_t amax = amax_of_key(key);
  if (!searches_scale<E>(rule)) return block_scale<E>(amax, rule);
  ScaleErrors errors;
  for (const uint32_t x : block) errors.add(x, amax);
  return searched_scale<E>(amax, errors, {});
}

template <class E>
Quantized quantize(const Block& block, ScaleRule rule) {
  Quantized out{.scale = scale_of<E>(block, rule)};
  for (size_t i = 0; i < 32; ++i) out.codes[i] = encode_in_block<E>(block[i], out.scale, rule);
  return out;
}

template <class E>
Block dequantize(const Quantized& block, ScaleRule rule, bool bf16) {
  Block out{};
  for (size_t i = 0; i < 32; ++i) {
    out[i] = bf16 ? uint32_t{decode_in_block_bf16<E>(block.codes[i], block.scale, rule)} << 16
                  : decode_in_block<E>(block.codes[i], block.scale, rule);
  }
  return out;
}

Quantized quantize(Format format, const Block& block, ScaleRule rule) {
  return with_element(format, [&]<class E>() { return quantize<E>(block, rule); });
}
Block dequantize(Format format, const Quantized& block, ScaleRule rule) {
  return with_element(format, [&]<class E>() { return dequantize<E>(block, rule, false); });
}

struct Example {
  Format format;
  std::vector<ScaleRule> rules;
  std::vector<double> input;  // the rest of the block is zero
  int scale;
  std::vector<int> codes;
  std::vector<double> values;
};

const std::vector<ScaleRule> kRceil{ScaleRule::rceil}, kFloor{ScaleRule::floor}, kFlashinfer{ScaleRule::flashinfer},
    kUp{ScaleRule::rceil, ScaleRule::flashinfer};
constexpr std::array kEveryRule{ScaleRule::rceil, ScaleRule::floor,      ScaleRule::even,
                                ScaleRule::ceil,  ScaleRule::flashinfer, ScaleRule::mse};
constexpr double kBf16Max = 0x1.FEp127;

const std::vector<Example> kExamples = {
    {Format::e4m3, kFloor, {450, 448, 464, -1, .3, .001}, 127, {0x7E, 0x7E, 0x7E, 0xB8, 0x2A, 0x01}, {448, 448, 448, -1, .3125, 0x1p-9}},
    {Format::e4m3, kRceil, {450, 448, 464, -1, .3, .001}, 128, {0x76, 0x76, 0x76, 0xB0, 0x22, 0x00}, {448, 448, 448, -1, .3125, 0}},
    {Format::e4m3,
     kRceil,
     {448, 17, 19, -17, 0x1p-10, 0x3p-10, -0x1p-11},
     127,
     {0x7E, 0x58, 0x5A, 0xD8, 0x00, 0x02, 0x80},
     {448, 16, 20, -16, 0, 0x1p-8, -0.0}},
    {Format::e4m3, kRceil, {448 * 0x1p-127, -0x1p-133}, 0, {0x7E, 0x88}, {448 * 0x1p-127, -0x1p-133}},
    {Format::e4m3, kRceil, {kNan, 3}, 255, {0x7F, 0x7F}, {kNan, kNan}},
    {Format::e5m2, kRceil, {57344, -1.125, 1.375, 0x1p-17, 0x3p-17}, 127, {0x7B, 0xBC, 0x3E, 0x00, 0x02}, {57344, -1, 1.5, 0, 0x1p-15}},
    {Format::e2m1,
     {ScaleRule::rceil, ScaleRule::floor, ScaleRule::even},
     {6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, -.25, -.75, -5},
     127,
     {7, 0, 2, 2, 4, 4, 6, 6, 8, 0xA, 0xE},
     {6, 0, 1, 1, 2, 2, 4, 4, -0.0, -1, -4}},
    {Format::e2m1,
     kFlashinfer,
     {6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, -.25, -.75, -5},
     127,
     {7, 0, 2, 2, 4, 4, 6, 6, 8, 0xA, 0xE},
     {6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -4}},
    {Format::e2m1, kFloor, {7, 3, -1, .4}, 127, {7, 5, 0xA, 1}, {6, 3, -1, .5}},
    {Format::e2m1, kUp, {7, 3, -1, .4}, 128, {6, 3, 9, 0}, {8, 3, -1, 0}},
    {Format::e2m1, kRceil, {0x1p-125, -0x1p-126}, 0, {6, 0xC}, {0x1p-125, -0x1p-126}},
    {Format::e2m1, kFlashinfer, {0x1p-125, -0x1p-126}, 0, {0, 8}, {0, 0}},
    {Format::e2m1, kFloor, {kBf16Max, 1e38}, 252, {7, 4}, {6 * 0x1p125, 2 * 0x1p125}},
    {Format::e2m1, kUp, {kBf16Max, 1e38}, 253, {6, 2}, {kInf, 0x1p126}},
    {Format::e2m1, kFlashinfer, {kNan, 3, -6}, 127, {7, 5, 0xF}, {6, 3, -6}},
    {Format::e2m1, kFlashinfer, {kInf, 1, -2}, 254, {7, 0, 8}, {kInf, 0, 0}},
    {Format::e2m1, kRceil, {kInf, 1, -2}, 255, {0, 0, 0}, {kNan, kNan, kNan}},
};

TEST(Block, WorkedExamplesHoldFromFp32AndFromBf16) {
  for (const Example& example : kExamples) {
    for (const ScaleRule rule : example.rules) {
      for (const bool from_bf16 : {false, true}) {
        Block block{};
        for (size_t i = 0; i < example.input.size(); ++i) {
          block[i] = from_bf16 ? uint32_t{test::slow_bf16(example.input[i])} << 16 : test::fp32_bits(example.input[i]);
        }
        const Quantized quantized = quantize(example.format, block, rule);
        const Block values = dequantize(example.format, quantized, rule);
        SCOPED_TRACE(testing::Message() << "example " << &example - kExamples.data() << " rule " << static_cast<int>(rule));
        EXPECT_EQ(quantized.scale, example.scale);
        for (size_t i = 0; i < example.codes.size(); ++i) {
          EXPECT_EQ(quantized.codes[i], example.codes[i]) << i;
          EXPECT_EQ(values[i], std::isnan(example.values[i]) ? 0x7FC00000U : test::fp32_bits(example.values[i])) << i;
        }
      }
    }
  }
}

TEST(Block, EveryBf16InABlockOfEveryScaleHasTheCodeOfItsRule) {
  for (const Format format : {Format::e4m3, Format::e5m2, Format::e2m1}) {
    with_element(format, [&]<class E>() {
      for (const ScaleRule rule : {ScaleRule::rceil, ScaleRule::flashinfer}) {
        for (uint32_t x = 0; x < 0x10000; x += x % 0x80 == 2 ? 0x7BU : 1U) {
          for (int scale = 0; scale < 256; ++scale) {
            const auto s = static_cast<uint8_t>(scale);
            const uint8_t expected = test::slow_code(slow(format), value_of_bits(x << 16), s, rule);
            ASSERT_EQ(encode_in_block<E>(x << 16, s, rule), expected) << std::hex << x << std::dec << " at " << scale;
          }
        }
      }
      EXPECT_EQ(decode_in_block<E>(E::sign_bit, 100, ScaleRule::flashinfer), 0U);
      EXPECT_EQ(decode_in_block<E>(E::sign_bit, 100, ScaleRule::rceil), 0x80000000U);
      EXPECT_EQ(decode_in_block<E>(E::sign_bit, 255, ScaleRule::flashinfer), 0x7FC00000U);
    });
  }
}

TEST(Block, OneNonFiniteElementPoisonsItsBlockButUnderFlashinfer) {
  for (const Format format : {Format::e4m3, Format::e5m2, Format::e2m1}) {
    for (const uint32_t nonfinite : {0x7F800000U, 0xFF800000U, 0x7FC00000U, 0xFF800001U}) {
      for (const ScaleRule rule : test::kBlockRules) {
        Block block{};
        block.fill(test::fp32_bits(-1.5)), block[17] = nonfinite;
        const Quantized quantized = quantize(format, block, rule);
        EXPECT_EQ(quantized.scale, 255);
        for (const uint8_t code : quantized.codes) EXPECT_EQ(code, format == Format::e2m1 ? 0 : 0x7F);
        for (const uint32_t value : dequantize(format, quantized, rule)) EXPECT_EQ(value, 0x7FC00000U);
      }
    }
  }
}

TEST(Block, ZeroesKeepTheirSigns) {
  for (const Format format : {Format::e4m3, Format::e5m2, Format::e2m1}) {
    Block block{};
    block[3] = 0x80000000U;
    const Quantized quantized = quantize(format, block, ScaleRule::rceil);
    EXPECT_EQ(quantized.scale, 0);
    EXPECT_EQ(quantized.codes[0], 0);
    EXPECT_EQ(quantized.codes[3], slow(format).minus_zero);
    EXPECT_EQ(dequantize(format, quantized, ScaleRule::rceil), block);
  }
}

// The table of docs/precision.md says so, too, beside what others do.
TEST(Block, IsOursWhereOtherProgramsDiffer) {
  // torchao's RCEIL and ModelOpt, which take a logarithm in fp32, have 2: a bit above 448 * 2^-125.
  EXPECT_EQ(block_scale<E4M3>(0x05600000U, ScaleRule::rceil), 2);
  EXPECT_EQ(block_scale<E4M3>(0x05600001U, ScaleRule::rceil), 3);
  // compressed-tensors has an infinite scale from here on, and +0 for what becomes zero.
  EXPECT_EQ(block_scale<E2M1>(0x7F5FFFFFU, ScaleRule::even), 252);
  EXPECT_EQ(block_scale<E2M1>(0x7F600000U, ScaleRule::even), 253);
  EXPECT_EQ(encode_in_block<E2M1>(0xBE000000U, 127, ScaleRule::even), 8) << "-0.125 with a scale of 1";
  EXPECT_EQ(decode_in_block<E2M1>(8, 127, ScaleRule::even), kFp32Sign);
  // torchao divides by the smallest normal number, under RCEIL by 1.
  EXPECT_EQ(encode_in_block<E4M3>(0x00400000U, 0, ScaleRule::rceil), 0x38) << "2^-127 with a scale of 2^-127 is 1";
  // ModelOpt has scale 0 with Inf or NaN in a block, torchao 254 or that of the largest number with Inf.
  for (const uint32_t amax : {kFp32Inf, kFp32Nan}) EXPECT_EQ(block_scale<E4M3>(amax, ScaleRule::rceil), kScaleNan);
  // ModelOpt rounds ties of E2M1 down.
  EXPECT_EQ(encode_in_block<E2M1>(0x3F400000U, 127, ScaleRule::rceil), 2) << "0.75 to the even code";
}

TEST(Flashinfer, TinyBlocksBecomeZeroAndNanBlocksNan) {
  Block block{};
  block.fill(0x7FC00000U);
  EXPECT_EQ(quantize<E2M1>(block, ScaleRule::flashinfer), (Quantized{255, [] {
                                                                       std::array<uint8_t, 32> all;
                                                                       all.fill(7);
                                                                       return all;
                                                                     }()}));
  const auto amax = [](uint32_t bits) {
    Block one{};
    one[0] = bits;
    return quantize<E2M1>(one, ScaleRule::flashinfer);
  };
  EXPECT_EQ(amax(0x01BF0000U).scale, 0);
  EXPECT_EQ(amax(0x01BF0000U).codes[0], 0) << "below 6 * 2^-126";
  EXPECT_EQ(amax(0x81BF0000U).codes[0], 8);
  EXPECT_EQ(amax(0x01C00000U).scale, 1) << "this project's choice";
  EXPECT_EQ(amax(0x01C10000U).scale, 2);
}

// A block whose amax is `amax` and whose other elements are random, down to 2^-24 of it and zero; every eighth is on a coarse grid, where
// ties lie. Those of bf16 amax are bf16.
Block block_below(uint32_t amax, bool bf16) {
  Block block{};
  block[0] = amax;
  const uint32_t exponent = amax & 0x7F800000U, fractions = bf16 ? 0x007F0000U : 0x007FFFFFU;
  for (size_t i = 1; i < 32; ++i) {
    const auto words = random_words({.seed = 11}, bf16 ? 1 : 2, uint64_t{amax} << 5 | i);
    const uint32_t drop = words[0] % 24 << 23, fraction = words[1] & (i % 8 == 0 ? 0x00700000U : fractions);
    const uint32_t magnitude = exponent > drop ? (exponent - drop) | fraction : fraction & amax;
    block[i] = (words[2] & 0x80000000U) | std::min(magnitude, amax);
  }
  return block;
}

TEST(Flashinfer, EqualsRceilWhereverAmaxIsAbove6Times2ToMinus125) {
  for (uint32_t amax = 0x0241; amax < 0x7F80; ++amax) {
    Block block = block_below(amax << 16, true);
    block[5] = 0x00010000U, block[6] = 0x807F0000U;  // subnormal
    ASSERT_EQ(quantize<E2M1>(block, ScaleRule::flashinfer), quantize<E2M1>(block, ScaleRule::rceil)) << std::hex << amax;
  }
}

// Blocks of so many elements up to `amax`, all of the last binades, which is where scales differ: multiples of 1/16 of amax's binade, and
// any others.
std::vector<uint32_t> searched_block(uint32_t amax, size_t count, uint64_t number, bool bf16) {
  std::vector<uint32_t> out{amax};
  const double binade = std::ldexp(1.0, std::ilogb(value_of_bits(amax)));
  while (out.size() < count) {
    const auto words = random_words({.seed = 12}, 3, number << 12 | out.size());
    const double share = words[0] % 4 == 0 ? words[1] * 0x1p-32 : words[0] % 4 == 1 ? words[1] % 33 / 16.0 : words[1] % 9 / 32.0;
    const double x = std::min(binade * share, value_of_bits(amax));
    const uint32_t bits = bf16 ? uint32_t{test::slow_bf16(x)} << 16 : test::fp32_bits(x);
    out.push_back((words[2] & kFp32Sign) | bits);
  }
  return out;
}

template <class E>
void check_searched(Format format, uint32_t amax, size_t count, bool bf16) {
  const std::vector<uint32_t> block = searched_block(amax, count, amax, bf16);
  std::vector<double> numbers;
  for (const uint32_t x : block) numbers.push_back(value_of_bits(x));
  ASSERT_EQ(scale_of<E>(block, ScaleRule::mse), test::slow_searched_scale(slow(format), numbers))
      << std::hex << amax << " in a block of " << std::dec << count << (bf16 ? ", bf16" : ", fp32");
}

// 512 of E4M3 in fp32 are the most of which amax decides.
TEST(Mse, HasTheLeastSquaredErrorOfThreeNeighboringScales) {
  for (const Format format : {Format::e4m3, Format::e5m2, Format::e2m1}) {
    with_element(format, [&]<class E>() {
      for (uint32_t amax = 1; amax < 0x7F80; ++amax) {
        const size_t count = amax % 61 == 0 ? 512 : amax % 7 == 0 ? 128 : amax % 5 == 0 ? 16 : 32;
        check_searched<E>(format, amax << 16, count, true);
        check_searched<E>(format, amax << 16 | (amax * 40503U & 0xFFFFU), count, false);
        if (::testing::Test::HasFatalFailure()) return;
      }
    });
  }
}

TEST(Mse, TakesTheSmallestOfEquallyGoodScales) {
  const auto scale = [](double amax, double others, size_t count) {
    std::vector<uint32_t> block(count, test::fp32_bits(others));
    block[0] = test::fp32_bits(amax);
    return scale_of<E2M1>(block, ScaleRule::mse);
  };
  EXPECT_EQ(scale(4, 0.25, 17), 126) << "16 elements save 1/16 each, and 4 adds 1";
  EXPECT_EQ(scale(4, 0.25, 16), 127);
  EXPECT_EQ(scale(7, 0, 32), 127) << "6 and 8 are equally near";
  EXPECT_EQ(scale(7.5, 0.5, 9), 127) << "8 elements save 1/4 each, and 7.5 adds 2";
  EXPECT_EQ(scale(7.5, 0.5, 8), 128);
  EXPECT_EQ(scale(6, 1, 32), 127);
  EXPECT_EQ(scale(7.5, 0.25, 301), 128) << "half of floor's scale saves 3/4, twice it 2";
}

// An order of any kind gives the same sums, also in parts.
TEST(Mse, IsDecidedByExactSums) {
  std::vector<uint32_t> block = searched_block(test::fp32_bits(7.99), 128, 1, false);
  const uint32_t amax = block[0];
  const auto errors = [&](size_t begin, size_t end) {
    ScaleErrors sums;
    for (size_t i = begin; i < end; ++i) sums.add(block[i], amax);
    return sums;
  };
  const ScaleErrors whole = errors(0, 128), first = errors(0, 50), second = errors(50, 128);
  std::reverse(block.begin(), block.end());
  EXPECT_EQ(errors(0, 128).below, whole.below);
  EXPECT_EQ(errors(0, 128).above, whole.above);
  EXPECT_EQ(first.below + second.below, whole.below);
  EXPECT_EQ(first.above + second.above, whole.above);
}

TEST(Mse, ClampsToTheRangeAfterTheSearch) {
  const auto scale = [](double amax, ScaleRange range) {
    ScaleErrors errors;
    const uint32_t bits = test::fp32_bits(amax);
    errors.add(bits, bits);
    return searched_scale<E2M1>(bits, errors, range);
  };
  EXPECT_EQ(scale(7.5, {}), 128);
  EXPECT_EQ(scale(7.5, {0, 127}), 127);
  EXPECT_EQ(scale(0.01, {120, 254}), 120);
  EXPECT_EQ(scale(0, {120, 254}), 120);
  EXPECT_EQ(scale(0x1p-149, {}), 0);
}

struct Requantized {
  Quantized first, second, third;
  Block once, twice;
};

template <class E>
Requantized requantize(const Block& block, ScaleRule rule, bool bf16) {
  Requantized out;
  out.first = quantize<E>(block, rule), out.once = dequantize<E>(out.first, rule, bf16);
  out.second = quantize<E>(out.once, rule), out.twice = dequantize<E>(out.second, rule, bf16);
  out.third = quantize<E>(out.twice, rule);
  return out;
}

bool finite(const Block& block) {
  return std::all_of(block.begin(), block.end(), [](uint32_t bits) { return (bits & 0x7F800000U) != 0x7F800000U; });
}

// Returns true if the maximum of a block is rounded down to one that the next smaller scale is for: half of the largest element, or under
// ceil half of the largest power of two.
bool drops(Format format, ScaleRule rule, double significand) {
  if (rule == ScaleRule::ceil) return significand > 1 && significand <= 1 + std::ldexp(0.5, -test::slow(format).mantissa_bits());
  if (format == Format::e2m1) return significand > 1.5 && significand < 1.75;
  return significand > 1.75 && (format == Format::e4m3 ? significand <= 1.8125 : significand < 1.875);
}

template <class E>
void check_requantization(Format format, uint32_t amax, ScaleRule rule, bool bf16) {
  const Requantized r = requantize<E>(block_below(amax, bf16), rule, bf16);
  if (!finite(r.once)) return;
  SCOPED_TRACE(testing::Message() << std::hex << amax << " rule " << static_cast<int>(rule) << " bf16 " << bf16);
  ASSERT_EQ(r.once, r.twice);
  int exact_from = 0;
  if (bf16) exact_from = format == Format::e4m3 ? 3 : format == Format::e5m2 ? 10 : 0;
  if (rule == ScaleRule::mse) return;  // it takes the smallest of the scales that change nothing
  if (rule == ScaleRule::floor || rule == ScaleRule::even) {
    if (r.first.scale >= exact_from) {
      ASSERT_EQ(r.first, r.second);
    }
    return;
  }
  const double significand = std::ldexp(value_of_bits(amax), 127 - static_cast<int>(amax >> 23));
  if (r.first.scale < exact_from) return;  // the block maximum itself may round
  ASSERT_EQ(r.second.scale, r.first.scale - (r.first.scale > 0 && drops(format, rule, significand) ? 1 : 0));
  ASSERT_EQ(r.third, r.second) << "a fixed point";
}

TEST(Requantization, KeepsEveryValueAndLowersAScaleByExactlyOneWhereTheMaximumRoundedDown) {
  for (const Format format : {Format::e4m3, Format::e5m2, Format::e2m1}) {
    with_element(format, [&]<class E>() {
      for (uint32_t amax = 1; amax < 0x7F80; ++amax) {
        for (const ScaleRule rule : kEveryRule) {
          if (rule == ScaleRule::flashinfer && format != Format::e2m1) continue;
          for (const bool bf16 : {true, false}) {
            check_requantization<E>(format, amax << 16 | (bf16 ? 0U : amax * 40503U & 0xFFFFU), rule, bf16);
          }
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    });
  }
}

}  // namespace mantissa::formats_block_test
