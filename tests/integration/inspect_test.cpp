// inspect and verify, run as a user runs them. Here a run folder holds the steps 1 to 3, of which 2 is damaged.
#include <gmock/gmock.h>

#include <iterator>
#include <sstream>

#include "checkpoint_shards.h"
#include "checkpoint_testing.h"
#include "process.h"

namespace mantissa::test::inspect_test {

using ::testing::HasSubstr;

class InspectTest : public CheckpointTest {
 protected:
  InspectTest() {
    CheckpointDirectory directory = open_directory(folder);
    for (int64_t step = 1; step <= 3; ++step) directory.save(State(step).content());
    const std::filesystem::path shard = checkpoints() / "step-00000002/shard-00000.safetensors";
    std::string content = read_file(shard);
    const auto at = static_cast<size_t>(header_bytes(shard)) + 100;
    content[at] = static_cast<char>(content[at] ^ 4);
    write_file(shard, content);
  }

  // The arguments are separated by spaces.
  ProcessResult mantissa(const std::string& arguments) const {
    std::istringstream in(arguments);
    return run_mantissa({std::istream_iterator<std::string>(in), {}}, folder.path());
  }
};

TEST_F(InspectTest, ListsCheckpointsWithTheirValidity) {
  std::filesystem::resize_file(checkpoints() / "step-00000001/shard-00000.safetensors", 10);
  for (const char* path : {".", "checkpoints"}) {
    const ProcessResult result = mantissa(std::string("inspect ") + path);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_THAT(result.output, HasSubstr("step-00000001  DAMAGED"));
    EXPECT_THAT(result.output, HasSubstr("step-00000003  complete  192 samples, 2 tensors, 7.8 KiB  (latest)"));
  }
}

TEST_F(InspectTest, NamesEachOfSeveralLists) {
  const std::string lists = mantissa("inspect . checkpoints/").output;
  EXPECT_THAT(lists, ::testing::StartsWith("./checkpoints\nstep-00000001  "));
  EXPECT_THAT(lists, HasSubstr("(latest)\ncheckpoints\nstep-00000001  "));
  EXPECT_THAT(mantissa("inspect .").output, ::testing::StartsWith("step-00000001  "));
}

TEST_F(InspectTest, ShowsWhatACheckpointHolds) {
  const ProcessResult result = mantissa("inspect checkpoints/step-00000003");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("step          3\n"));
  EXPECT_THAT(result.output, HasSubstr("\"hidden_size\": 512"));
  EXPECT_THAT(result.output, HasSubstr("fp32 [100, 10]"));
}

TEST_F(InspectTest, DiffNamesTensorsAndEndsWithOne) {
  const ProcessResult different = mantissa("inspect --diff checkpoints/step-00000001 checkpoints/step-00000003");
  EXPECT_EQ(different.exit_code, 1) << different.errors;
  EXPECT_THAT(different.output, HasSubstr("1000 of 1000 elements, the first at 0"));
  const ProcessResult equal = mantissa("inspect --diff checkpoints/step-00000003 checkpoints/latest");
  EXPECT_EQ(equal.exit_code, 0) << equal.errors;
  EXPECT_THAT(equal.output, HasSubstr("all 2 tensors are equal"));
  EXPECT_EQ(mantissa("inspect --diff checkpoints/step-00000003").exit_code, 2);
  EXPECT_EQ(mantissa("inspect --diff checkpoints/step-00000002 checkpoints/step-00000003").exit_code, 4);
}

TEST_F(InspectTest, DescribesDataFiles) {
  write_file(folder / "a.txt", "hello");
  const ProcessResult result = mantissa("inspect a.txt");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("a.txt: text, 5 bytes of text, ids 101 to 111"));
  EXPECT_EQ(mantissa("inspect missing.bin").exit_code, 2);
}

TEST_F(InspectTest, VerifyReadsEverythingAndEndsWithFourOnDamage) {
  const ProcessResult good = mantissa("verify .");
  EXPECT_EQ(good.exit_code, 0) << good.errors;
  EXPECT_THAT(good.output, HasSubstr("intact: step 3, 2 tensors, 8000 bytes in 1 shard"));
  const ProcessResult bad = mantissa("verify checkpoints/step-00000002");
  EXPECT_EQ(bad.exit_code, 4);
  EXPECT_THAT(bad.errors, HasSubstr("step-00000002/shard-00000.safetensors: chunk 0 (bytes 0 to 8000) is damaged"));
  EXPECT_EQ(mantissa("verify nowhere").exit_code, 2);
}

TEST_F(InspectTest, VerifyAndDiffEndWithFourWhereTheFolderDoesNotStandForWhatLatestNames) {
  const auto expect_four = [&](const std::string& reason) {
    for (const char* command : {"verify .", "verify checkpoints/latest", "inspect --diff . checkpoints/step-00000001",
                                "inspect --diff checkpoints/step-00000001 checkpoints"}) {
      const ProcessResult result = mantissa(command);
      EXPECT_EQ(result.exit_code, 4) << command << ": " << result.output;
      EXPECT_THAT(result.errors, HasSubstr(reason)) << command;
    }
  };
  const std::string good = read_file(checkpoints() / "latest");
  write_file(checkpoints() / "latest", "step-00000003 0123456789abcdef\n");
  expect_four("is not the version that `latest` names");
  write_file(checkpoints() / "latest", good);
  std::filesystem::remove_all(checkpoints() / "step-00000003");
  expect_four("step-00000003: there is no such checkpoint folder");
  std::filesystem::copy(checkpoints() / "step-00000001", checkpoints() / "step-00000003");
  expect_four("step-00000003: holds step 1");
  EXPECT_EQ(mantissa("verify checkpoints/step-00000003").exit_code, 4);
}

TEST_F(InspectTest, HelpShowsAnExample) {
  for (const char* command : {"inspect --help", "verify --help"}) {
    const ProcessResult result = mantissa(command);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(result.output, HasSubstr("Example:\n  mantissa "));
  }
}

}  // namespace mantissa::test::inspect_test
