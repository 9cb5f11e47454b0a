// A state that replaces another of its step, as after a stop during the evaluation of a checkpoint step: kills and errors at every file
// operation, on file systems that can exchange two names and on those that cannot.
#include <gmock/gmock.h>

#include <cerrno>

#include "checkpoint_testing.h"
#include "process.h"
#include "reliability/fault_injection.h"

namespace mantissa::test::checkpoint_replace_test {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// The steps 2, 3 and, of a branch that was left, 9; `latest` and `best` name 3. What is saved is another state of step 3.
class Replacing : public CheckpointTest, public ::testing::WithParamInterface<bool> {
 protected:
  Replacing() : original_(folder / "original"), old_(3) {
    old_.weights()[0] += 1;
    CheckpointDirectory directory(original_, {.latest = 2}, "setup");
    directory.save(State(9).content());
    directory.save(State(2).content());
    directory.name_best(directory.save(old_.content()));
  }

  void reset() const {
    fs::remove_all(checkpoints());
    fs::copy(original_, checkpoints(), fs::copy_options::recursive);
  }
  Fault fault(Fault::Kind kind, int point) const { return {.kind = kind, .at = point, .no_exchange = GetParam()}; }
  CheckpointDirectory open() const { return CheckpointDirectory(checkpoints(), {.latest = 2}, "trial"); }

  enum class Found { neither, old, replaced };
  Found found() const {
    Found out = Found::neither;
    load_newest(checkpoints(), [&](CheckpointReader& reader) {
      if (old_.equals(reader)) out = Found::old;
      if (State(3).equals(reader)) out = Found::replaced;
    });
    return out;
  }

  // As commands find the best one, which is the only one of its step.
  Found best() const {
    Found out = Found::neither;
    load_checkpoint(checkpoints() / "best", [&](CheckpointReader& reader) {
      if (old_.equals(reader)) out = Found::old;
      if (State(3).equals(reader)) out = Found::replaced;
    });
    return out;
  }

  fs::path original_;
  State old_;
};

INSTANTIATE_TEST_SUITE_P(FileSystem, Replacing, ::testing::Bool(),
                         [](const auto& tested) { return tested.param ? "WithoutExchange" : "WithExchange"; });

TEST_P(Replacing, AKillAtAnyFileOperationLeavesTheOldOrTheNewStateOfTheStep) {
  int point = 1, old_ones = 0, new_ones = 0;
  for (bool finished = false; !finished; ++point) {
    ASSERT_LT(point, 200);
    reset();
    finished = WIFEXITED(wait_for(start_child([&] {
      CheckpointDirectory directory = open();
      arm_fault(fault(Fault::kill, point));
      directory.save(State(3).content());
      return 0;
    })));
    if (!GetParam()) {
      ASSERT_NE(found(), Found::neither) << "as eval finds it, killed at file operation " << point;
      ASSERT_EQ(best(), found()) << "killed at file operation " << point;
    }
    CheckpointDirectory directory = open();  // the next run sweeps first
    const Found left = found();
    ASSERT_EQ(best(), left) << "killed at file operation " << point;
    ASSERT_NE(left, Found::neither) << "killed at file operation " << point;
    ASSERT_TRUE(left == Found::replaced || new_ones == 0) << "the new state was lost again at file operation " << point;
    ++(left == Found::old ? old_ones : new_ones);
    ASSERT_THAT(names_in(checkpoints()), Each(Not(StartsWith(".")))) << point;
    directory.save(State(3).content());
    ASSERT_EQ(found(), Found::replaced);
    ASSERT_EQ(best(), Found::replaced);
    ASSERT_EQ(read_file(checkpoints() / "best"), read_file(checkpoints() / "latest"));
    ASSERT_THAT(names_in(checkpoints()), Each(Not(StartsWith(".")))) << point;
  }
  EXPECT_GT(old_ones, 10);
  EXPECT_GT(new_ones, 5);
}

TEST_P(Replacing, AnErrorAtAnyFileOperationLosesNeitherAndTheNextSaveWorks) {
  int point = 1, failed = 0;
  for (bool reached = true; reached; ++point) {
    ASSERT_LT(point, 200);
    reset();
    CheckpointDirectory directory = open();
    Fault error = fault(Fault::error, point);
    error.error_number = point % 2 == 0 ? ENOSPC : EIO;
    arm_fault(error);
    const ExitCode code = error_code_of([&] { directory.save(State(3).content()); });
    reached = disarm_fault();
    ASSERT_THAT(code, AnyOf(ExitCode::ok, ExitCode::storage)) << "file operation " << point;
    const Found left = found();
    ASSERT_EQ(best(), left) << "file operation " << point;
    ASSERT_TRUE(left == Found::replaced || (left == Found::old && code != ExitCode::ok)) << "file operation " << point;
    failed += code != ExitCode::ok;
    directory.save(State(3).content());
    ASSERT_EQ(found(), Found::replaced) << "file operation " << point;
    ASSERT_THAT(names_in(checkpoints()), Each(Not(AnyOf(StartsWith(".tmp-"), StartsWith(".old-"))))) << point;
  }
  EXPECT_GT(failed, 15);
}

// The state is published already, and `best` has the hashes of both.
TEST_P(Replacing, AStateIsSavedThoughItsNameAsTheBestCannotBeWritten) {
  reset();
  CheckpointDirectory directory = open();
  Fault unnamed = fault(Fault::error, 2);  // the first is the pointer to both
  unnamed.only = "open";
  unnamed.path = "best.tmp";
  arm_fault(unnamed);
  EXPECT_EQ(error_code_of([&] { directory.save(State(3).content()); }), ExitCode::ok);
  EXPECT_TRUE(disarm_fault());
  EXPECT_EQ(best(), Found::replaced);
  EXPECT_NE(read_file(checkpoints() / "best"), read_file(checkpoints() / "latest"));
  EXPECT_THAT(log(), HasSubstr("step-00000003, is not named yet: "));
  directory.save(State(3).content());
  EXPECT_EQ(read_file(checkpoints() / "best"), read_file(checkpoints() / "latest"));
}

// The new folder is there and its name is synced before `latest` names it; only then is the old one deleted.
TEST_P(Replacing, TheOldStateIsDeletedAfterTheNewOneIsPublished) {
  reset();
  CheckpointDirectory directory = open();
  arm_fault(fault(Fault::none, 0));
  directory.save(State(3).content());
  disarm_fault();
  const auto calls = calls_since_armed({"fsync", "rename", "renameat2", "unlinkat"});
  const std::vector<std::string> placed = GetParam() ? std::vector<std::string>{"rename", "rename"} : std::vector<std::string>{"renameat2"};
  std::vector<std::string> expected = {"fsync", "fsync", "fsync", "fsync", "rename", "fsync"};  // shard, manifest, temporary folder; best
  expected.insert(expected.end(), placed.begin(), placed.end());
  expected.insert(expected.end(), {"fsync", "fsync", "rename", "fsync", "rename"});  // the parent; latest; into the trash
  ASSERT_GE(calls.size(), expected.size());
  EXPECT_EQ(found(), Found::replaced);
  EXPECT_THAT(names_in(checkpoints()), ElementsAre("LOCK", "best", "latest", "step-00000002", "step-00000003", "step-00000009"));
  EXPECT_EQ(std::vector<std::string>(calls.begin(), calls.begin() + static_cast<ptrdiff_t>(expected.size())), expected);
}

// The bytes of the new one do not reach the disk as they left memory: the save fails, and the old one is there again.
TEST_P(Replacing, ANewStateThatCannotBeReadBackGivesItsPlaceToTheOldOne) {
  reset();
  CheckpointDirectory directory = open();
  Fault unreadable = fault(Fault::error, 1);
  unreadable.only = "open";
  unreadable.path = "step-00000003/manifest.json";
  unreadable.at = 2;  // the first is the look at what is there
  unreadable.times = 2;
  arm_fault(unreadable);
  EXPECT_EQ(error_code_of([&] { directory.save(State(3).content()); }), ExitCode::storage);
  EXPECT_TRUE(disarm_fault());
  EXPECT_EQ(found(), Found::old);
  EXPECT_EQ(log().find("passed over"), std::string::npos) << "it is what latest names\n" << log();
  EXPECT_THAT(log(), HasSubstr("step-00000003: set aside as .bad-"));
  directory.save(State(3).content());
  EXPECT_EQ(found(), Found::replaced);
  EXPECT_EQ(log().find("was not deleted"), std::string::npos) << "what came back is in the way of no later save\n" << log();
}

}  // namespace mantissa::test::checkpoint_replace_test
