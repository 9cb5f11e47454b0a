// Elements of any width against tables of their values, the codecs of the formats that have codes, and the definition of the transform.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "mantissa/base/rng.h"
#include "mantissa/formats/free_rounding.h"
#include "mantissa/formats/hadamard.h"
#include "slow_formats.h"

namespace mantissa::free_element_test {

std::vector<FreeElement> all_elements() {
  std::vector<FreeElement> out;
  for (int exponent = 1; exponent <= FreeElement::kMostExponentBits; ++exponent) {
    for (int mantissa = 0; mantissa <= FreeElement::kMostMantissaBits; ++mantissa) out.push_back({exponent, mantissa});
  }
  return out;
}

std::string name_of(const FreeElement& of) { return "e" + std::to_string(of.exponent_bits) + "m" + std::to_string(of.mantissa_bits); }

std::vector<double> magnitudes(const FreeElement& of) { return test::free_magnitudes(of.exponent_bits, of.mantissa_bits); }

// Magnitudes around an element and around the middle of it and the next.
std::vector<double> probes(const std::vector<double>& table) {
  std::vector<double> out = {0x1p-149, 0x1p-126, 1e30, 0x1p127};
  for (size_t i = 0; i + 1 < table.size(); ++i) {
    for (const double at : {table[i], (table[i] + table[i + 1]) / 2}) {
      for (const double factor : {1.0, 1.0 - 0x1p-24, 1.0 + 0x1p-24}) out.push_back(at * factor);
    }
  }
  for (const double factor : {1.0, 1.03, 1.24, 1.26, 1.9, 2.0, 7.0}) out.push_back(table.back() * factor);
  return out;
}

TEST(FreeElement, FactsAreThoseOfTheLargestElement) {
  for (const FreeElement& of : all_elements()) {
    const double largest = magnitudes(of).back();
    EXPECT_EQ(ElementGrid(of).largest(), largest) << name_of(of);
    EXPECT_EQ(of.facts().emax, std::ilogb(largest)) << name_of(of);
    EXPECT_EQ(of.facts().max_fraction, static_cast<uint32_t>((std::ldexp(largest, -std::ilogb(largest)) - 1.0) * 0x1p23)) << name_of(of);
  }
  EXPECT_EQ(ElementGrid({4, 3}).largest(), 448.0);
  EXPECT_EQ(ElementGrid({5, 2}).largest(), 57344.0);
  EXPECT_EQ(ElementGrid({2, 1}).largest(), 6.0);
  EXPECT_EQ(ElementGrid({3, 2}).largest(), 28.0) << "OCP's FP6";
  EXPECT_EQ(ElementGrid({2, 3}).largest(), 7.5) << "OCP's FP6";
  EXPECT_EQ(ElementGrid({1, 2}).largest(), 3.5) << "a grid of equal steps";
  EXPECT_EQ(ElementGrid({4, 2}).largest(), 448.0) << "no code is reserved";
}

TEST(FreeElement, RoundsToTheNearestOfAllValuesAndTiesToAnEvenNumberOfSteps) {
  for (const FreeElement& of : all_elements()) {
    const ElementGrid grid(of);
    const std::vector<double> table = magnitudes(of);
    for (const double y : probes(table)) {
      const double found = grid.nearest(y);
      const double near = std::min(y, table.back());
      const auto above = std::ranges::lower_bound(table, near);
      double best = *above;
      if (above != table.begin()) {
        const double below = *(above - 1), down = near - below, up = *above - near;
        if (down < up || (down == up && std::fmod(below / (*above - below), 2.0) == 0.0)) best = below;
      }
      ASSERT_EQ(found, best) << name_of(of) << " of " << y;
      ASSERT_EQ(grid.nearest(-y), -best);
    }
  }
}

TEST(FreeElement, ZerosKeepTheirSign) {
  const ElementGrid e2m1({2, 1});
  for (const double zero : {0.0, -0.0, 0x1p-149, -0x1p-149}) {
    EXPECT_EQ(std::signbit(e2m1.nearest(zero)), std::signbit(zero));
    EXPECT_EQ(e2m1.nearest(zero), 0.0);
    EXPECT_EQ(std::signbit(e2m1.at_random(zero, ~0U)), std::signbit(zero));
  }
}

// Every bf16 pattern at scales from one end to the other has the value of its code.
template <class E>
void expect_codec(const FreeElement& of) {
  const ElementGrid grid(of);
  for (const int code : {0, 1, 60, 118, 126, 127, 128, 140, 200, 253, 254}) {
    const auto scale = static_cast<uint8_t>(code);
    for (uint32_t i = 0; i < 0x10000; ++i) {
      const uint32_t bits = i << 16;
      if ((bits & 0x7FFFFFFFU) >= kFp32Inf) continue;
      const double x = double{__builtin_bit_cast(float, bits)}, power = std::ldexp(1.0, scale - 127);
      const auto value = static_cast<float>(grid.nearest(x / power) * power);
      ASSERT_EQ(__builtin_bit_cast(uint32_t, value), E::decode(E::encode(bits, scale), scale)) << std::hex << i << " at " << int{scale};
    }
  }
  EXPECT_EQ(of.facts().emax, E::emax);
  EXPECT_EQ(of.facts().max_fraction, E::max_fraction);
  EXPECT_EQ(of.facts().mantissa_bits, E::mantissa_bits);
}

TEST(FreeElement, HasTheValuesOfTheFormatsWithCodes) {
  expect_codec<E4M3>({4, 3});
  expect_codec<E5M2>({5, 2});
  expect_codec<E2M1>({2, 1});
}

TEST(FreeElement, HasTheValuesOfOtherInstancesOfTheCodec) {
  expect_codec<Element<3, 2, 0x1F>>({3, 2});
  expect_codec<Element<2, 3, 0x1F>>({2, 3});
  expect_codec<Element<1, 2, 0x7>>({1, 2});
  expect_codec<Element<3, 0, 0x7>>({3, 0});
  expect_codec<Element<5, 1, 0x3F>>({5, 1});
  expect_codec<Element<4, 2, 0x3F>>({4, 2});
  expect_codec<Element<3, 4, 0x7F>>({3, 4});
}

TEST(FreeElement, RandomRoundingTakesOneOfTheTwoNeighborsByItsWord) {
  const ElementGrid e2m1({2, 1});
  for (const double sign : {1.0, -1.0}) {
    EXPECT_EQ(e2m1.at_random(sign * 4.5, 0), sign * 6.0);
    EXPECT_EQ(e2m1.at_random(sign * 4.5, 0x3FFFFFFFU), sign * 6.0);
    EXPECT_EQ(e2m1.at_random(sign * 4.5, 0x40000000U), sign * 4.0) << "a quarter of the words is below";
    EXPECT_EQ(e2m1.at_random(sign * 4.5, ~0U), sign * 4.0);
    EXPECT_EQ(e2m1.at_random(sign * 0.125, 0x3FFFFFFFU), sign * 0.5);
    EXPECT_EQ(e2m1.at_random(sign * 0.125, 0x40000000U), 0.0);
    EXPECT_EQ(e2m1.at_random(sign * 100.0, 0), sign * 6.0);
    EXPECT_EQ(e2m1.at_random(sign * 100.0, ~0U), sign * 6.0);
  }
}

TEST(FreeElement, RandomRoundingLeavesElements) {
  for (const FreeElement& of : all_elements()) {
    const ElementGrid grid(of);
    for (const double element : magnitudes(of)) {
      for (const uint32_t word : {0U, 1U, 0x80000000U, ~0U}) ASSERT_EQ(grid.at_random(element, word), element) << name_of(of);
    }
  }
}

// The probability is exact to 2^-32, so the mean over equidistant words is, too.
TEST(FreeElement, RandomRoundingHasTheMeanOfItsValue) {
  for (const FreeElement& of : all_elements()) {
    for (const double part : {0.03, 0.4, 0.77}) {
      const ElementGrid grid(of);
      const double y = part * grid.largest();
      double sum = 0.0;
      constexpr uint32_t kWords = 4096;
      for (uint32_t i = 0; i < kWords; ++i) sum += grid.at_random(y, i << 20 | 0x80000U);
      EXPECT_NEAR(sum / kWords, y, (grid.at_random(y, 0) - grid.at_random(y, ~0U)) / kWords) << name_of(of);
    }
  }
}

// Transformer Engine's get_wgrad_sign_vector(), and the matrix that it makes of it.
TEST(Hadamard, Of16IsTransformerEngines) {
  constexpr int kSigns[] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  for (int i = 0; i < 16; ++i) {
    double x[16] = {};
    x[i] = 1.0;
    hadamard_transform(x, 16);
    for (unsigned j = 0; j < 16; ++j) {
      const int sylvester = std::popcount(static_cast<unsigned>(i) & j) % 2 == 0 ? 1 : -1;
      EXPECT_EQ(x[j], kSigns[i] * sylvester * 0.25) << i << ", " << j;
    }
  }
}

TEST(Hadamard, IsOrthogonal) {
  for (const int64_t n : {int64_t{16}, int64_t{32}}) {
    std::vector<std::vector<double>> rows;
    for (int64_t i = 0; i < n; ++i) {
      std::vector<double>& row = rows.emplace_back(static_cast<size_t>(n));
      row[static_cast<size_t>(i)] = 1.0;
      hadamard_transform(row.data(), n);
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      for (size_t j = 0; j < rows.size(); ++j) {
        double product = 0.0;
        for (size_t k = 0; k < rows.size(); ++k) product += rows[i][k] * rows[j][k];
        EXPECT_NEAR(product, i == j ? 1.0 : 0.0, 1e-15);
      }
    }
  }
}

TEST(Hadamard, SignsOf32AreNotThoseOf16Twice) { EXPECT_NE(kHadamardSigns >> 16, kHadamardSigns & 0xFFFFU); }

}  // namespace mantissa::free_element_test
