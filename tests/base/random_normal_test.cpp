// The kernel RandomNormal against random_normal(): every draw to the bit, at every level of the instruction set.
#include "base/cpu_level.h"
#include "base/parallel.h"
#include "kernel_backends.h"
#include "testing.h"

namespace mantissa::random_normal_test {

constexpr RngKey kKey{.seed = 0x123456789abcdef0, .stream = RngStream::init};

std::vector<float> expected(uint32_t what, int64_t first, int64_t count, double std) {
  std::vector<float> out;
  for (int64_t i = first; i < first + count; ++i)
    out.push_back(static_cast<float>(std * static_cast<double>(random_normal(kKey, what, static_cast<uint64_t>(i)))));
  return out;
}

std::vector<float> drawn(Backend& device, uint32_t what, int64_t first, int64_t count, double std) {
  const Tensor out = empty(device, Dtype::f32, {count});
  device.run(RandomNormal{.out = out, .key = kKey, .what = what, .first_index = first, .std = std});
  return to_host<float>(out);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// About 16 of so many draws are too close to the middle between two floats for the vectors to decide.
TEST(RandomNormalKernel, GivesTheBitsOfTheFunctionAtEveryLevel) {
  const CpuLevel before = cpu_level();
  const auto device = make_backend("cpu");
  const int64_t count = (int64_t{1} << 22) + 37, first = (int64_t{1} << 32) - count / 2;  // across the carry of the counter
  const std::vector<float> all = expected(7, first, count, 0.02);
  for (const CpuLevel level : {CpuLevel::x86_64, CpuLevel::x86_64_v3, CpuLevel::x86_64_v4}) {
    if (level > highest_cpu_level()) continue;
    use_cpu_level(level);
    EXPECT_TRUE(same_bits(drawn(*device, 7, first, count, 0.02), all)) << name(level);
  }
  use_cpu_level(before);
}

class RandomNormalOnEach : public test::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(, RandomNormalOnEach, ::testing::ValuesIn(test::tested_backends()), test::backend_of);

TEST_P(RandomNormalOnEach, DependsOnNoLengthAndNoThreads) {
  for (const int64_t count : {1, 2, 63, 64, 65, 1000, 100000}) {
    const std::vector<float> all = expected(3, 5, count, 1.0);
    for (const int threads : {1, 3}) {
      set_num_threads(threads);
      EXPECT_TRUE(same_bits(drawn(device(), 3, 5, count, 1.0), all)) << count << " draws, " << threads << " threads";
    }
  }
  set_num_threads(0);
}

TEST_P(RandomNormalOnEach, OfABoxHasTheDrawsOfTheWhole) {
  constexpr int64_t kRows = 700, kColumns = 129, kWhole = 300, kFirst = 2 * kWhole + 11;
  const Tensor box = empty(device(), Dtype::f32, {kRows, kColumns});
  device().run(RandomNormal{.out = box, .key = kKey, .what = 1, .first_index = kFirst, .std = 2.0, .row_stride = kWhole});
  const std::vector<float> values = to_host<float>(box);
  for (int64_t row = 0; row < kRows; ++row) {
    const std::vector<float> one(values.begin() + row * kColumns, values.begin() + (row + 1) * kColumns);
    ASSERT_TRUE(same_bits(one, expected(1, kFirst + row * kWhole, kColumns, 2.0))) << "row " << row;
  }
}

}  // namespace mantissa::random_normal_test
