// Reads that fail: a matter of the machine, unless it is a checkpoint that is read.
#include <gmock/gmock.h>

#include "fault_injection.h"
#include "mantissa/train/load_config.h"
#include "metrics/run_metrics.h"
#include "training.h"

namespace mantissa::read_errors_test {

using ::testing::HasSubstr;

class ReadErrors : public test::TrainingTest {
 protected:
  template <class Action>
  void expect_environment(const std::string& file, Action&& action) const {
    for (const int error : {EIO, EINVAL}) {
      test::arm_fault({.kind = test::Fault::error, .at = 1, .error_number = error, .only = "pread"});
      const Error failure = test::error_of(action);
      EXPECT_TRUE(test::disarm_fault()) << file;
      EXPECT_EQ(failure.code(), ExitCode::environment) << failure.what();
      EXPECT_THAT(failure.what(), HasSubstr(folder_ / file + ": reading at byte 0 failed: " + system_message(error)));
    }
  }
};

TEST_F(ReadErrors, OfWhatTheUserNamedAreTheEnvironments) {
  test::write_file(folder_ / "run.json", "{}");
  test::write_file(folder_ / "metrics.jsonl", "{}\n");
  expect_environment("run.json", [&] { load_run_config({.file = folder_ / "run.json", .text = {}, .set_files = {}, .sets = {}}); });
  expect_environment("metrics.jsonl", [&] { read_run_metrics(folder_.path()); });
  expect_environment("text.txt", [&] { File::open_input(folder_ / "text.txt").content(1 << 20); });
}

}  // namespace mantissa::read_errors_test
