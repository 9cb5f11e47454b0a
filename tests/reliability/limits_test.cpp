// The real program under limits of the system that are too low (fault table rows 20 and 29).
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <optional>

#include "checkpoint/checkpoint.h"
#include "process.h"
#include "training.h"

namespace mantissa::limits_test {

using ::testing::HasSubstr;

class Limits : public test::TrainingTest {
 protected:
  Limits() { test::write_file(folder_ / "run.json", effective_config(config("run", {"training.steps=1", "data.tokenizer=byte"}).config)); }

  test::ProcessResult limited(const std::string& limit, const std::string& arguments) const {
    std::filesystem::remove_all(run_folder("run"));
    return test::run_process({"bash", "-c", "ulimit " + limit + "; exec env -i " MANTISSA_BINARY " " + arguments}, folder_.path());
  }

  // A sanitizer needs more address space than any limit leaves.
  bool address_space_can_be_limited() const { return limited("-v 1000000", "--version").exit_code == 0; }
};

TEST_F(Limits, SmallStackIsAnErrorWhereverKernelsRun) {
  ASSERT_EQ(test::run_mantissa({"train", "run.json", "--set", "logging.dir=trained", "--set", "checkpoint.dir=trained/checkpoints"},
                               folder_.path())
                .exit_code,
            0);
  for (const std::string command : {"train run.json", "eval trained", "generate trained", "bench gemm --time-budget 1",
                                    "bench train run.json --time-budget 1", "conformance " MANTISSA_SOURCE_DIR "/tests/golden", "doctor"}) {
    const auto run = limited("-s 512", command);
    EXPECT_EQ(run.exit_code, 3) << command << run.errors;
    EXPECT_THAT(run.errors, HasSubstr("kernels need 1024 KiB of stack")) << command;
    EXPECT_THAT(run.errors, HasSubstr("limited to 512 KiB (ulimit -s)")) << command;
  }
  EXPECT_FALSE(std::filesystem::exists(run_folder("run"))) << "refused before it leaves traces";
  EXPECT_EQ(limited("-s 512", "config check run.json").exit_code, 0) << "no kernels";
}

TEST_F(Limits, StackThatIsJustEnoughServesTheLargestHeadsOfEveryThread) {
  const auto run = limited("-s 1200",
                           "train run.json --set training.threads=3 --set model.head_dim=256 --set precision.dtype=bf16 --set "
                           "training.seq_len=512 --set model.max_position_embeddings=512");
  EXPECT_EQ(run.exit_code, 0) << run.errors;
}

TEST_F(Limits, NoLimitOfTheAddressSpaceEndsInASignal) {
  if (!address_space_can_be_limited()) GTEST_SKIP() << "the program does not start in 1 GB of address space";
  bool refused = false, ran = false;
  for (int64_t mib = 72; mib <= 240; mib += mib < 140 ? 8 : 33) {
    const auto run = limited("-v " + std::to_string(mib * 1024), "train run.json --set training.threads=4");
    EXPECT_TRUE(run.exit_code == 0 || run.exit_code == 3) << mib << " MiB: " << run.exit_code << run.errors;
    if (run.exit_code == 3) {
      EXPECT_THAT(run.errors, HasSubstr(text("the address space is limited to ", mib * 1024, " KiB (ulimit -v)")));
    }
    refused = refused || run.exit_code == 3;
    ran = ran || run.exit_code == 0;
  }
  EXPECT_TRUE(refused);
  EXPECT_TRUE(ran);
}

// 150 TB of weights, gradients and moments.
TEST_F(Limits, ARunThatNeedsMoreMemoryThanThereIsIsRefusedBeforeItLeavesTraces) {
  const std::string large =
      "train run.json --set model.intermediate_size=4194304 --set model.hidden_size=4096 --set model.num_attention_heads=32 "
      "--set model.num_layers=200";
  const auto run = test::run_process({"sh", "-c", "exec " MANTISSA_BINARY " " + large}, folder_.path());
  EXPECT_EQ(run.exit_code, 3) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("not enough memory: training needs "));
  EXPECT_FALSE(std::filesystem::exists(run_folder("run")));
  if (!address_space_can_be_limited()) GTEST_SKIP() << "the program does not start in 1 GB of address space";
  for (const std::string command : {"", "launch --max-restarts 3 -- "}) {
    const auto all_the_same = limited("-v 8000000", command + large + " --set training.allow_memory_overcommit=true");
    EXPECT_EQ(all_the_same.exit_code, 3) << all_the_same.errors;
    EXPECT_THAT(all_the_same.errors, HasSubstr("out of memory: cannot allocate "));
    EXPECT_THAT(all_the_same.errors, ::testing::Not(HasSubstr("restart 1"))) << "it would meet the same";
  }
}

// Throws like a library that runs out of memory inside pthread_once.
void throw_through_the_c_library_without_memory() {
  const auto device = make_backend("cpu");
  const rlimit none{.rlim_cur = 0, .rlim_max = 0};
  ::setrlimit(RLIMIT_AS, &none);
  void* volatile taken = nullptr;  // the compiler may do without an allocation that nobody looks at
  for (size_t size = size_t{1} << 20; size > 0; size -= size > 4096 ? size / 2 : 16) {  // freed blocks of every size, too
    do taken = std::malloc(size);
    while (taken != nullptr);
  }
  std::once_flag flag;
  try {
    std::call_once(flag, [] { throw 3; });
  } catch (int code) {
    std::_Exit(code);
  }
}

TEST_F(Limits, ExceptionForWantOfMemoryPassesTheFramesOfTheCLibrary) {
  if (!address_space_can_be_limited()) GTEST_SKIP() << "the program does not start in 1 GB of address space";
  EXPECT_EXIT(throw_through_the_c_library_without_memory(), ::testing::ExitedWithCode(3), "");
}

TEST_F(Limits, MoreThreadsThanTheAddressSpaceHoldsIsAnErrorThatNamesTheThread) {
  if (!address_space_can_be_limited()) GTEST_SKIP() << "the program does not start in 1 GB of address space";
  const auto run = limited("-v 400000", "train run.json --set training.threads=500");
  EXPECT_EQ(run.exit_code, 3) << run.errors;
  // Threads that run already take address space, too, maybe after the look whether there is enough.
  EXPECT_THAT(run.errors, ::testing::ContainsRegex("thread [0-9]+ of 500 (needs 4096 KiB more memory|cannot be started)"));
  EXPECT_THAT(run.errors, HasSubstr("limited to 400000 KiB (ulimit -v)"));
  EXPECT_FALSE(std::filesystem::exists(run_folder("run"))) << "refused before it leaves traces";
}

class ProcessLimit : public Limits {
 protected:
  // Runs as a user who may have so many processes and threads, because the superuser is not held to a limit. Returns nothing where that
  // cannot be had.
  std::optional<test::ProcessResult> bench(const std::string& most) const {
    std::vector<std::string> words = {"bash", "-c",
                                      "ulimit -u " + most + "; exec " MANTISSA_BINARY " bench gemm --threads 4 --time-budget 1"};
    const std::string user = std::to_string(50000 + ::getpid() % 10000);  // nobody, and not that of a test beside this one
    if (::geteuid() == 0) words.insert(words.begin(), {"setpriv", "--reuid", user, "--clear-groups"});
    const auto run = test::run_process(words, folder_.path());
    return run.exit_code == 126 || run.exit_code == 127 ? std::nullopt : std::optional(run);
  }
};

TEST_F(ProcessLimit, ThreadThatTheSystemRefusesIsAnErrorThatNamesIt) {
  const auto run = bench("1");
  if (!run) GTEST_SKIP() << "no setpriv, or the program is out of reach for others";
  EXPECT_EQ(run->exit_code, 3) << run->errors;
  EXPECT_THAT(run->errors, HasSubstr(" of 4 cannot be started: "));
  EXPECT_THAT(run->errors, HasSubstr("may have 1 processes and threads (ulimit -u)"));
}

TEST_F(ProcessLimit, HoldsForTheThreadsOfALibrary) {
  if (::geteuid() != 0) GTEST_SKIP() << "other processes of this user count";
  const auto run = bench("6");  // four of ours, three more of the library
  if (!run) GTEST_SKIP() << "no setpriv, or the program is out of reach for others";
  EXPECT_EQ(run->exit_code, 3) << run->errors;
  EXPECT_THAT(run->errors, HasSubstr("thread 4 of 4 of oneDNN cannot be started: "));
}

}  // namespace mantissa::limits_test
