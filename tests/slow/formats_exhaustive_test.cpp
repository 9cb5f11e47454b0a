// All 2^32 fp32 inputs through every element encoder and, as amax, every scale rule, against the slow reference.
#include <gtest/gtest.h>

#include <atomic>

#include "base/parallel.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/with_element.h"
#include "mantissa/tensor/quantized_tensor.h"
#include "slow_formats.h"

namespace mantissa {

void PrintTo(Format format, std::ostream* out) { *out << format_name(format); }

}  // namespace mantissa

namespace mantissa::formats_exhaustive_test {

// The number of inputs in [0, count) that fail `holds`; `first` is one of them.
template <class Holds>
int64_t failures(int64_t count, int64_t& first, Holds&& holds) {
  std::atomic<int64_t> failed = 0, example = -1;
  parallel_for(count, int64_t{1} << 20, [&](int64_t begin, int64_t end) {
    for (int64_t x = begin; x < end; ++x) {
      if (holds(static_cast<uint32_t>(x))) continue;
      failed += 1;
      example = x;
    }
  });
  first = example;
  return failed;
}

class Exhaustive : public ::testing::TestWithParam<Format> {};

TEST_P(Exhaustive, EveryFp32IsEncodedToTheNearestElementAtScaleOne) {
  const test::SlowFormat& reference = test::slow(GetParam());
  with_element(GetParam(), [&]<class E>() {
    int64_t example = 0;
    const int64_t failed = failures(int64_t{1} << 32, example,
                                    [&](uint32_t x) { return E::encode(x, 127) == test::slow_nearest(reference, test::value_of_bits(x)); });
    EXPECT_EQ(failed, 0) << "one of them: " << std::hex << example;
  });
}

TEST_P(Exhaustive, EveryFp32AmaxGivesTheScaleOfTheDefinitionUnderEveryRule) {
  const test::SlowFormat& reference = test::slow(GetParam());
  with_element(GetParam(), [&]<class E>() {
    for (const ScaleRule rule : test::kAllRules) {
      int64_t example = 0;
      const int64_t failed = failures(int64_t{1} << 31, example, [&](uint32_t x) {
        return block_scale<E>(x, rule) == test::slow_scale(reference, test::value_of_bits(x), rule);
      });
      EXPECT_EQ(failed, 0) << "one of them: " << std::hex << example;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Formats, Exhaustive, ::testing::Values(Format::e4m3, Format::e5m2, Format::e2m1),
                         [](const auto& c) { return std::string(format_name(c.param)); });

}  // namespace mantissa::formats_exhaustive_test
