// The levels of the instruction set that the fast kernels are compiled for: which one runs, and that every kernel gives the same bits at
// all of them: fused multiply-adds are written out, no sum is reassociated, and no approximate instruction is used.
#include <cstdlib>

#include "base/cpu_level.h"
#include "kernel_cases.h"
#include "mantissa/base/error.h"
#include "process.h"

namespace mantissa::test::cpu_levels_test {

constexpr CpuLevel kLevels[] = {CpuLevel::x86_64, CpuLevel::x86_64_v3, CpuLevel::x86_64_v4};

// A level until the end of the block.
class Level {
 public:
  explicit Level(CpuLevel level) : before_(cpu_level()) { use_cpu_level(level); }
  ~Level() { use_cpu_level(before_); }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;

 private:
  CpuLevel before_;
};

class CpuLevels : public ::testing::TestWithParam<std::tuple<std::string, Dtype>> {};

TEST_P(CpuLevels, GiveTheSameBits) {
  if (highest_cpu_level() == CpuLevel::x86_64) GTEST_SKIP() << "this CPU, or this compiler, has one level only";
  const auto& [kernel, dtype] = GetParam();
  const auto device = make_backend("cpu");
  for (const KernelCase& c : kernel_cases()) {
    if (c.kernel != kernel) continue;
    SCOPED_TRACE(c.kernel + " " + c.variant);
    Operands expected(*device, dtype);
    {
      const Level baseline(CpuLevel::x86_64);
      c.run(expected);
    }
    for (const CpuLevel level : kLevels) {
      if (level == CpuLevel::x86_64 || level > highest_cpu_level()) continue;
      const Level scope(level);
      Operands actual(*device, dtype);
      c.run(actual);
      for (size_t i = 0; i < expected.results().size(); ++i) {
        EXPECT_TRUE(same_bits(actual.results()[i].tensor, expected.results()[i].tensor))
            << expected.results()[i].name << ", " << name(level);
      }
    }
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(, CpuLevels, ::testing::Combine(::testing::ValuesIn(kernel_names()), ::testing::Values(Dtype::f32, Dtype::bf16)),
                         [](const auto& c) { return std::get<0>(c.param) + "_" + dtype_name(std::get<1>(c.param)); });

TEST(CpuLevel, IsTheCpusUnlessTheVariableNamesALowerOne) {
  for (const CpuLevel highest : kLevels) {
    EXPECT_EQ(limited_cpu_level(highest, nullptr), highest);
    for (const CpuLevel limit : kLevels) EXPECT_EQ(limited_cpu_level(highest, name(limit)), std::min(highest, limit)) << name(limit);
  }
  EXPECT_STREQ(name(CpuLevel::x86_64), "x86-64");
  EXPECT_STREQ(name(CpuLevel::x86_64_v3), "x86-64-v3");
  EXPECT_STREQ(name(CpuLevel::x86_64_v4), "x86-64-v4");
}

TEST(CpuLevel, RefusesOtherNames) {
  for (const char* wrong : {"", "avx2", "x86-64-v2", "X86-64", "x86-64-v33"}) {
    try {
      limited_cpu_level(CpuLevel::x86_64_v4, wrong);
      ADD_FAILURE() << '"' << wrong << "\" was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_EQ(error.what(), text("MANTISSA_MAX_CPU_LEVEL: must be x86-64, x86-64-v3 or x86-64-v4, got \"", wrong, '"'));
    }
  }
}

TEST(CpuLevel, AboveTheCpusIsNotUsed) {
  if (highest_cpu_level() == CpuLevel::x86_64_v4) GTEST_SKIP() << "this CPU has every level";
  EXPECT_THROW(use_cpu_level(CpuLevel::x86_64_v4), Error);
}

ProcessResult doctor_at(const std::string& level) {
  const TemporaryFolder folder;
  return run_process({"env", "MANTISSA_MAX_CPU_LEVEL=" + level, MANTISSA_BINARY, "doctor"}, folder.path());
}

TEST(CpuLevel, OfTheProgramIsThatOfTheVariable) {
  for (const CpuLevel level : kLevels) {
    const ProcessResult run = doctor_at(name(level));
    EXPECT_EQ(run.exit_code, 0) << run.errors;
    std::string line = text("\nother kernels    ", name(std::min(level, highest_cpu_level())));
    line += level < highest_cpu_level() ? text(" (MANTISSA_MAX_CPU_LEVEL; the CPU has ", name(highest_cpu_level()), ")\n") : "\n";
    EXPECT_NE(run.output.find(line), std::string::npos) << run.output;
  }
}

TEST(CpuLevel, ThatIsNoneIsAnErrorOfTheProgram) {
  const ProcessResult run = doctor_at("v4");
  EXPECT_EQ(run.exit_code, static_cast<int>(ExitCode::usage));
  EXPECT_EQ(run.errors, "error: MANTISSA_MAX_CPU_LEVEL: must be x86-64, x86-64-v3 or x86-64-v4, got \"v4\"\n");
}

// The first kernel may come after minutes of reading data.
TEST(CpuLevel, IsReadWhenABackendIsOpened) {
  const CpuLevel before = cpu_level();
  detail::cpu_level_in_use = -1;
  ASSERT_EQ(::setenv("MANTISSA_MAX_CPU_LEVEL", "v4", 1), 0);
  EXPECT_THROW(make_backend("cpu"), Error);
  ASSERT_EQ(::unsetenv("MANTISSA_MAX_CPU_LEVEL"), 0);
  make_backend("cpu");
  EXPECT_EQ(cpu_level(), highest_cpu_level());
  use_cpu_level(before);
}

// The script by which tests run like on other CPUs (instruction_sets.cmake): a test that is skipped looks like one that passed.
ProcessResult under(const std::string& level) {
  const TemporaryFolder folder;
  return run_process(
      {MANTISSA_SOURCE_DIR "/tests/under.sh", MANTISSA_BINARY, "MANTISSA_MAX_CPU_LEVEL=" + level, "printenv", "MANTISSA_MAX_CPU_LEVEL"},
      folder.path());
}

TEST(Under, RunsATestAtALowerLevel) {
  if (highest_cpu_level() == CpuLevel::x86_64) GTEST_SKIP() << "there is none";
  const ProcessResult run = under("x86-64");
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_TRUE(run.output.ends_with("other kernels    x86-64\nx86-64\n")) << run.output;
}

TEST(Under, SkipsATestWhereTheCpuHasNoMore) {
  const ProcessResult run = under(name(highest_cpu_level()));
  EXPECT_EQ(run.exit_code, 77) << run.errors;
  EXPECT_EQ(run.output,
            text("SKIPPED: MANTISSA_MAX_CPU_LEVEL=", name(highest_cpu_level()), " leaves out nothing that is used on this CPU\n"));
}

TEST(Under, FailsWhereTheSettingIsWrong) {
  const ProcessResult run = under("x86-64-v5");
  EXPECT_NE(run.exit_code, 0);
  EXPECT_NE(run.exit_code, 77);
}

}  // namespace mantissa::test::cpu_levels_test
