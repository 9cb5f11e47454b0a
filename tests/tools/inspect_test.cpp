// inspect and verify. Here a run folder holds the steps 1 to 3, of which 2 is damaged.
#include <gmock/gmock.h>

#include "checkpoint_shards.h"
#include "checkpoint_testing.h"
#include "tool_commands.h"

namespace mantissa::test::inspect_test {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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

  // Returns the output. The exit code is that of a command that succeeds but for the damage.
  static std::string output(const std::string& line, int exit_code = 0) {
    const CommandResult result = command_result(words_of(line));
    EXPECT_EQ(result.exit_code, exit_code) << line << '\n' << result.error;
    return result.output;
  }
  static std::string error(const std::string& line) {
    const CommandResult result = command_result(words_of(line));
    EXPECT_EQ(result.exit_code, 4) << line << '\n' << result.output;
    return result.error;
  }

  const WorkingFolder here_{folder.path()};
};

TEST_F(InspectTest, ListsCheckpointsWithTheirValidityAndNamesEachOfSeveralLists) {
  std::filesystem::resize_file(checkpoints() / "step-00000001/shard-00000.safetensors", 10);
  const std::string list = output("inspect .");
  EXPECT_THAT(list, StartsWith("step-00000001  DAMAGED"));
  EXPECT_THAT(list, EndsWith("step-00000003  complete  192 samples, 2 tensors, 7.8 KiB  (latest)\n"));
  EXPECT_THAT(output("inspect . checkpoints/"),
              AllOf(StartsWith("./checkpoints\n" + list), HasSubstr("(latest)\ncheckpoints\nstep-00000001  ")));
}

TEST_F(InspectTest, ShowsCheckpointsAndDataFiles) {
  EXPECT_THAT(output("inspect checkpoints/step-00000003"),
              AllOf(HasSubstr("step          3\n"), HasSubstr("\"hidden_size\": 512"), HasSubstr("fp32 [100, 10]")));
  write_file(folder / "a.txt", "hello");
  EXPECT_THAT(output("inspect a.txt"), HasSubstr("a.txt: text, 5 bytes of text, ids 101 to 111"));
}

TEST_F(InspectTest, DiffNamesTensorsAndEndsWithOne) {
  EXPECT_THAT(output("inspect --diff checkpoints/step-00000001 checkpoints/step-00000003", 1),
              HasSubstr("1000 of 1000 elements, the first at 0"));
  EXPECT_THAT(output("inspect --diff checkpoints/step-00000003 checkpoints/latest"), HasSubstr("all 2 tensors are equal"));
  error("inspect --diff checkpoints/step-00000002 checkpoints/step-00000003");
}

TEST_F(InspectTest, VerifyReadsEverythingAndEndsWithFourOnDamage) {
  EXPECT_THAT(output("verify ."), HasSubstr("intact: step 3, 2 tensors, 8000 bytes in 1 shard"));
  EXPECT_THAT(error("verify checkpoints/step-00000002"),
              HasSubstr("step-00000002/shard-00000.safetensors: chunk 0 (bytes 0 to 8000) is damaged"));
}

TEST_F(InspectTest, VerifyAndDiffEndWithFourWhereTheFolderDoesNotStandForWhatLatestNames) {
  const auto expect_four = [&](const std::string& reason) {
    for (const char* line : {"verify .", "verify checkpoints/latest", "inspect --diff . checkpoints/step-00000001",
                             "inspect --diff checkpoints/step-00000001 checkpoints"})
      EXPECT_THAT(error(line), HasSubstr(reason)) << line;
  };
  const std::string good = read_file(checkpoints() / "latest");
  write_file(checkpoints() / "latest", "step-00000003 0123456789abcdef\n");
  expect_four("is not the version that was named");
  write_file(checkpoints() / "latest", good);
  std::filesystem::remove_all(checkpoints() / "step-00000003");
  expect_four("step-00000003: there is no such checkpoint folder");
  std::filesystem::copy(checkpoints() / "step-00000001", checkpoints() / "step-00000003");
  expect_four("step-00000003: holds step 1");
  error("verify checkpoints/step-00000003");
}

}  // namespace mantissa::test::inspect_test
