// The system fails to read a checkpoint that is whole: once, or for good (fault table, rows 4 and 5).
#include <gmock/gmock.h>

#include <cerrno>
#include <limits>

#include "checkpoint_testing.h"
#include "reliability/fault_injection.h"
#include "training.h"

namespace mantissa::test::checkpoint_reads_test {

using ::testing::HasSubstr;

class CheckpointReads : public CheckpointTest {
 protected:
  CheckpointReads() {
    CheckpointDirectory directory = open_directory(folder);
    for (int64_t step = 1; step <= 2; ++step) directory.save(State(step).content());
  }

  // The step that a search finds under a fault.
  std::optional<int64_t> newest_under(const Fault& fault) const {
    arm_fault(fault);
    const auto found = newest();
    disarm_fault();
    return found;
  }
};

TEST_F(CheckpointReads, ASingleErrorAnywhereIsTriedAgainAndCostsNothing) {
  for (const char* call : {"open", "pread"}) {
    int point = 1;
    for (bool reached = true; reached; ++point) {
      ASSERT_LT(point, 50);
      EXPECT_EQ(newest_under({.kind = Fault::error, .at = point, .error_number = EIO, .only = call}), 2) << call << ' ' << point;
      reached = fault_state.hit;
    }
    EXPECT_GT(point, 4) << call;
  }
  EXPECT_THAT(log(), HasSubstr("step-00000002/manifest.json: opening failed: Input/output error; trying once more"));
  EXPECT_THAT(log(), HasSubstr("latest: opening failed: Input/output error; trying once more"));
  EXPECT_EQ(log().find("passed over"), std::string::npos) << log();
}

TEST_F(CheckpointReads, AnErrorThatStaysTakesTheStepBeforeAndNamesBoth) {
  const Fault stays = {.kind = Fault::error,
                       .at = 1,
                       .times = std::numeric_limits<int>::max(),
                       .error_number = EIO,
                       .only = "open",
                       .path = "step-00000002/shard"};
  EXPECT_EQ(newest_under(stays), 1);
  EXPECT_THAT(log(), HasSubstr("checkpoint passed over: " + (checkpoints() / "step-00000002/shard-00000.safetensors").string()));
  EXPECT_THAT(log(), HasSubstr("checkpoints: step 1 is loaded instead of step 2"));
  EXPECT_EQ(newest(), 2) << "nothing was changed";
}

// A run goes on between the listing of its checkpoints and the opening of one: that is gone, and a newer one there.
TEST_F(CheckpointReads, ACheckpointThatIsDeletedBeforeItIsOpenedIsLookedForAgainFiveTimes) {
  for (const int times : {1, 4, 5}) {
    CheckpointDirectory directory = open_directory(folder);
    int64_t latest = *newest();
    int replaced = 0;
    Fault fault{.kind = Fault::other, .at = 1, .only = "open", .path = "/manifest.json"};
    fault.action = [&] {
      directory.save(State(latest + 1).content());
      std::filesystem::remove_all(checkpoints() / checkpoint_name(latest++));
      if (++replaced < times) arm_fault(fault);
    };
    arm_fault(fault);
    const ExitCode code = error_code_of([&] { EXPECT_EQ(open_checkpoint(checkpoints()).manifest().step, latest) << times; });
    disarm_fault();
    EXPECT_EQ(replaced, times);
    EXPECT_EQ(code, times < 5 ? ExitCode::ok : ExitCode::data) << times;
  }
}

TEST_F(CheckpointReads, WhatIsDamagedOrNotThereIsNotTriedAgain) {
  std::filesystem::remove(checkpoints() / "step-00000002/shard-00000.safetensors");
  EXPECT_EQ(newest(), 1);
  EXPECT_EQ(log().find("trying once more"), std::string::npos) << log();
  write_file(checkpoints() / "step-00000002/manifest.json", "{");
  arm_fault({.only = "open", .path = "/manifest.json"});
  EXPECT_EQ(error_code_of([&] { open_checkpoint(checkpoints()); }), ExitCode::data);
  disarm_fault();
  EXPECT_EQ(fault_state.operations, 1);
}

TEST_F(CheckpointReads, ACheckpointThatIsNamedIsTriedTwiceToo) {
  const auto path = checkpoints() / "step-00000001";
  const auto load = [](CheckpointReader& reader) { reader.verify(); };
  for (const int times : {1, 2}) {
    arm_fault({.kind = Fault::error, .at = 1, .times = times, .error_number = EIO, .only = "pread"});
    EXPECT_EQ(error_code_of([&] { load_checkpoint(path, load); }), times == 1 ? ExitCode::ok : ExitCode::data);
    disarm_fault();
  }
}

// Errors in all that a resume reads.
class ResumeReads : public TrainingTest {};

TEST_F(ResumeReads, ASingleErrorInAShardCostsNoStep) {
  run("run", {"training.steps=2", "checkpoint.interval=1"});
  int taken = 0;
  for (int at = 1; at == 1 || fault_state.hit; ++at) {
    ASSERT_LT(at, 200);
    arm_fault({.kind = Fault::error, .at = at, .error_number = EIO, .only = "pread"});
    try {
      EXPECT_TRUE(run("run", {"training.steps=2", "checkpoint.resume=auto"}).losses.empty()) << "steps were lost by read " << at;
      ++taken;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::environment) << error.what();  // in the text, before any checkpoint is read
    }
  }
  disarm_fault();
  EXPECT_GT(taken, 2);
}

}  // namespace mantissa::test::checkpoint_reads_test
