// Kills, full disks, damage and a second process: the promises about checkpoints, rows 1-5, 27 and 28 of the fault table.
#include <gmock/gmock.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>

#include "checkpoint_shards.h"
#include "checkpoint_testing.h"
#include "mantissa/base/rng.h"
#include "process.h"
#include "reliability/fault_injection.h"

namespace mantissa::test::checkpoint_faults_test {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The step that load_newest finds, after a check that its values are those of its step and that nothing was passed over.
int64_t newest_intact(const fs::path& checkpoints, int64_t elements) {
  bool equal = false;
  const auto loaded =
      load_newest(checkpoints, [&](CheckpointReader& reader) { equal = State(reader.manifest().step, elements).equals(reader); });
  EXPECT_TRUE(loaded && equal && loaded->passed_over == 0);
  return loaded ? loaded->step : -1;
}

class CheckpointFaults : public CheckpointTest {};

// ---- kills

// A folder with the saved steps 1 and 2 (and keep 2, so that saving step 3 deletes step 1), copied afresh for every trial.
class SaveOfStepThree {
 public:
  explicit SaveOfStepThree(const fs::path& folder) : original_(folder / "original"), checkpoints_(folder / "checkpoints") {
    CheckpointDirectory directory(original_, {.latest = 2}, "setup");
    for (int64_t step = 1; step <= 2; ++step) directory.save(State(step).content());
  }
  void reset() const {
    fs::remove_all(checkpoints_);
    fs::copy(original_, checkpoints_, fs::copy_options::recursive);
  }
  void save() const { CheckpointDirectory(checkpoints_, {.latest = 2}, "trial").save(State(3).content()); }
  const fs::path& checkpoints() const { return checkpoints_; }

 private:
  fs::path original_, checkpoints_;
};

TEST_F(CheckpointFaults, AKillAtAnyFileOperationOfASaveLeavesTheOldOrTheNewCheckpoint) {
  const SaveOfStepThree trial(folder.path());
  int point = 1, old_ones = 0, new_ones = 0;
  for (bool finished = false; !finished; ++point) {
    ASSERT_LT(point, 200);
    trial.reset();
    const int status = wait_for(start_child([&] {
      arm_fault({.kind = Fault::kill, .at = point});
      trial.save();
      return 0;
    }));
    finished = WIFEXITED(status);
    ASSERT_TRUE(!finished || WEXITSTATUS(status) == 0);
    const int64_t newest = newest_intact(trial.checkpoints(), 1000);
    ASSERT_THAT(newest, AnyOf(2, 3)) << "killed at file operation " << point;
    ASSERT_GE(newest, new_ones > 0 ? 3 : 2) << "the new checkpoint was lost again at file operation " << point;
    ++(newest == 2 ? old_ones : new_ones);
    trial.save();  // the next run sweeps what is left and saves
    ASSERT_EQ(newest_intact(trial.checkpoints(), 1000), 3);
    for (const std::string& name : names_in(trial.checkpoints()))
      ASSERT_FALSE(name.starts_with(".tmp-") || name.starts_with(".trash-")) << name;
  }
  EXPECT_GT(old_ones, 10);
  EXPECT_GT(new_ones, 5);
}

// A better one is saved over a best one that nothing but `best` keeps.
TEST_F(CheckpointFaults, AKillAtAnyFileOperationOfABetterOneLeavesTheOldOrTheNewBest) {
  const fs::path original = folder / "original";
  {
    CheckpointDirectory directory(original, {.latest = 2}, "setup");
    directory.name_best(directory.save(State(1).content()));
    for (int64_t step = 2; step <= 3; ++step) directory.save(State(step).content());
  }
  const auto best = [&] {
    bool equal = false;
    const auto load = [&](CheckpointReader& reader) { equal = State(reader.manifest().step).equals(reader); };
    const int64_t step = load_checkpoint(checkpoints() / "best", load).step;
    EXPECT_TRUE(equal);
    return step;
  };
  int point = 1, old_ones = 0, new_ones = 0;
  for (bool finished = false; !finished; ++point) {
    ASSERT_LT(point, 200);
    fs::remove_all(checkpoints());
    fs::copy(original, checkpoints(), fs::copy_options::recursive);
    const int status = wait_for(start_child([&] {
      arm_fault({.kind = Fault::kill, .at = point});
      CheckpointDirectory directory(checkpoints(), {.latest = 2}, "trial");
      directory.name_best(directory.save(State(4).content()));
      return 0;
    }));
    finished = WIFEXITED(status);
    ASSERT_TRUE(!finished || WEXITSTATUS(status) == 0);
    const int64_t found = best();
    ASSERT_THAT(found, AnyOf(1, 4)) << "killed at file operation " << point;
    ASSERT_GE(found, new_ones > 0 ? 4 : 1) << "the new best was lost again at file operation " << point;
    ++(found == 1 ? old_ones : new_ones);
    CheckpointDirectory next(checkpoints(), {.latest = 2}, "next");  // the next run sweeps what is left, and goes on from the newest
    const int64_t newest = newest_intact(checkpoints(), 1000);
    ASSERT_TRUE(next.adopt_best(newest == 4 ? 4 : 1));
    ASSERT_EQ(best(), newest == 4 ? 4 : 1);
  }
  EXPECT_GT(old_ones, 10);
  EXPECT_GT(new_ones, 2);
}

// The order of syncs and renames alone decides what a power cut may lose: nothing is renamed before it and, for a folder, all it holds is
// synced.
TEST_F(CheckpointFaults, EverythingIsSyncedBeforeItIsRenamed) {
  const SaveOfStepThree trial(folder.path());
  trial.reset();
  CheckpointDirectory directory(trial.checkpoints(), {.latest = 2}, "trial");
  arm_fault({});
  directory.save(State(3).content());
  disarm_fault();
  EXPECT_EQ(joined(calls_since_armed({"pwrite", "fsync", "rename"})),
            "pwrite, pwrite, pwrite, fsync, "  // the header of the shard and its two tensors
            "pwrite, fsync, "                  // the manifest
            "fsync, rename, fsync, "           // the temporary folder, into its place, the parent
            "pwrite, fsync, rename, fsync, "   // latest
            "rename");                         // the oldest, into the trash
}

TEST_F(CheckpointFaults, TheBestIsSyncedBeforeItIsRenamedAndTheOneBeforeItGoesLast) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  directory.name_best(directory.save(State(1).content()));
  for (int64_t step = 2; step <= 3; ++step) directory.save(State(step).content());
  const SavedCheckpoint better = directory.save(State(4).content());
  arm_fault({});
  directory.name_best(better);
  disarm_fault();
  EXPECT_EQ(joined(calls_since_armed({"pwrite", "fsync", "rename"})), "pwrite, fsync, rename, fsync, rename");
}

// ---- errors of the system

TEST_F(CheckpointFaults, ABestOneThatCannotBeNamedStaysAndIsNamedAtALaterSave) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 2});
  directory.name_best(directory.save(State(1).content()));
  for (int64_t step = 2; step <= 3; ++step) directory.save(State(step).content());
  const SavedCheckpoint better = directory.save(State(4).content());
  Fault unnamed{.kind = Fault::error, .at = 1, .only = "open", .path = "best.tmp"};
  arm_fault(unnamed);
  EXPECT_EQ(error_code_of([&] { directory.name_best(better); }), ExitCode::storage);
  EXPECT_TRUE(disarm_fault());
  EXPECT_EQ(directory.best().value().path, better.path);
  unnamed.times = 2;
  arm_fault(unnamed);
  for (int64_t step = 5; step <= 7; ++step) directory.save(State(step).content());
  EXPECT_TRUE(disarm_fault());
  EXPECT_THAT(log(), HasSubstr("step-00000004, is not named yet: ")) << "which cost nobody the save";
  EXPECT_EQ(read_pointer(checkpoints(), kBest).value().name, "step-00000004");
  EXPECT_THAT(steps_in(checkpoints()), ElementsAre(4, 6, 7)) << "a best one that is not named is kept; the one before it is gone";
}

// One of the two at each operation: saves do not tell them apart.
TEST_F(CheckpointFaults, AnErrorAtAnyFileOperationFailsTheSaveCleanlyAndTheNextOneWorks) {
  const SaveOfStepThree trial(folder.path());
  int point = 1, failed = 0;
  for (bool reached = true; reached; ++point) {
    ASSERT_LT(point, 200);
    trial.reset();
    CheckpointDirectory directory(trial.checkpoints(), {.latest = 2}, "trial");
    arm_fault({.kind = Fault::error, .at = point, .error_number = point % 2 == 0 ? ENOSPC : EIO});
    const ExitCode code = error_code_of([&] { directory.save(State(3).content()); });
    reached = disarm_fault();
    ASSERT_THAT(code, AnyOf(ExitCode::ok, ExitCode::storage)) << "file operation " << point;
    failed += code != ExitCode::ok;
    ASSERT_THAT(newest_intact(trial.checkpoints(), 1000), code == ExitCode::ok ? AnyOf(3, 3) : AnyOf(2, 3)) << "file operation " << point;
    directory.save(State(3).content());
    ASSERT_EQ(newest_intact(trial.checkpoints(), 1000), 3) << "file operation " << point;
  }
  EXPECT_GT(failed, 15);
}

TEST_F(CheckpointFaults, AFailedFsyncIsNotTriedAgainAndLeavesNoTemporaryFolder) {
  const SaveOfStepThree trial(folder.path());
  trial.reset();
  CheckpointDirectory directory(trial.checkpoints(), {.latest = 2}, "trial");
  const auto before = names_in(trial.checkpoints());
  arm_fault({.kind = Fault::error, .at = 1, .error_number = EIO, .only = "fsync"});
  EXPECT_EQ(error_code_of([&] { directory.save(State(3).content()); }), ExitCode::storage);
  EXPECT_TRUE(disarm_fault());
  EXPECT_THAT(calls_since_armed({"fsync"}), ElementsAre("fsync"));
  EXPECT_EQ(names_in(trial.checkpoints()), before);
}

TEST_F(CheckpointFaults, ShortWritesAreContinued) {
  const SaveOfStepThree trial(folder.path());
  for (int at = 1; at <= 5; ++at) {  // LOCK, the two tensors of the shard, the manifest, latest
    trial.reset();
    arm_fault({.kind = Fault::short_write, .at = at, .only = "pwrite"});
    CheckpointDirectory directory(trial.checkpoints(), {.latest = 2}, "trial");
    EXPECT_THAT(read_file(trial.checkpoints() / "LOCK"), ::testing::EndsWith("job trial\n")) << "write " << at;
    directory.save(State(3).content());
    EXPECT_TRUE(disarm_fault()) << "write " << at;
    EXPECT_EQ(newest_intact(trial.checkpoints(), 1000), 3) << "write " << at;
    EXPECT_EQ(open_checkpoint(trial.checkpoints()).directory(), trial.checkpoints() / checkpoint_name(3)) << "write " << at;
  }
}

// Runs in a mount namespace of its own, with a tmpfs of 1 MiB; 77 where that is not allowed.
int fill_a_small_disk(const fs::path& checkpoints) {
  const bool own = ::unshare(CLONE_NEWNS) == 0 || ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0;
  if (!own || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return 77;
  if (::mount("tmpfs", checkpoints.c_str(), "tmpfs", 0, "size=1m") != 0) return 77;
  CheckpointDirectory directory(checkpoints, {.latest = 2}, "full");
  constexpr int64_t kElements = 50'000;  // 400 kB: room for two
  const auto code_of_save = [&](int64_t step) { return error_code_of([&] { directory.save(State(step, kElements).content()); }); };
  if (code_of_save(1) != ExitCode::ok || code_of_save(2) != ExitCode::ok) return 2;
  if (code_of_save(3) != ExitCode::storage || code_of_save(4) != ExitCode::storage) return 3;
  if (names_in(checkpoints).size() != 4 || newest_intact(checkpoints, kElements) != 2) return 4;
  fs::remove_all(checkpoints / checkpoint_name(1));  // somebody makes room
  return code_of_save(5) == ExitCode::ok && newest_intact(checkpoints, kElements) == 5 ? 0 : 5;
}

TEST_F(CheckpointFaults, AFullDiskFailsTheSaveAndKeepsTheOldOnes) {
  fs::create_directory(checkpoints());
  const int status = wait_for(start_child([&] { return fill_a_small_disk(checkpoints()); }));
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no right to mount a tmpfs";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(CheckpointFaults, ADeletedFolderFailsTheSaveUntilItIsBack) {
  CheckpointDirectory directory = open_directory(folder);
  directory.save(State(1).content());
  fs::remove_all(checkpoints());
  EXPECT_EQ(error_code_of([&] { directory.save(State(2).content()); }), ExitCode::storage);
  fs::create_directory(checkpoints());
  directory.save(State(3).content());
  EXPECT_EQ(newest_intact(checkpoints(), 1000), 3);
  EXPECT_EQ(error_code_of([&] { open_directory(folder); }), ExitCode::environment) << "the new folder is locked too";
}

// ---- damage

TEST_F(CheckpointFaults, FlippedBitsAndAnotherLengthOfAShardAreFound) {
  constexpr int64_t kTwoChunks = 600'000;  // 4.8 MB
  const fs::path path = open_directory(folder).save(State(1, kTwoChunks).content()).path, shard = path / "shard-00000.safetensors";
  const int64_t header = header_bytes(shard), bytes = header + kTwoChunks * 8;
  const auto expect_found = [&](int64_t position, const std::string& where) {
    flip_byte(shard, position);
    const Error error = error_of([&] { CheckpointReader(path).verify(); });
    flip_byte(shard, position);
    EXPECT_EQ(error.code(), ExitCode::data);
    ASSERT_THAT(error.what(), HasSubstr("shard-00000.safetensors: " + where)) << position;
  };
  for (uint64_t i = 0; i < 40; ++i) {
    const auto position = static_cast<int64_t>(random_words({.seed = 9}, 0, i)[0] % (kTwoChunks * 8));
    expect_found(header + position, text("chunk ", position / kCheckpointChunkBytes, " "));
  }
  for (int64_t position = 0; position < header; position += 3) expect_found(position, "is damaged: its header does not match the manifest");
  CheckpointReader(path).verify();
  const auto expect_refused = [&](int64_t size) {
    fs::resize_file(shard, static_cast<uintmax_t>(size));
    EXPECT_EQ(error_code_of([&] { CheckpointReader reader(path); }), ExitCode::data) << size;
  };
  for (const int64_t size : {bytes + 1, bytes - 1, header + kCheckpointChunkBytes, header}) expect_refused(size);
  fs::resize_file(shard, static_cast<uintmax_t>(bytes));  // all but the header is zeros now
  CheckpointReader reader(path);
  EXPECT_THROW(reader.verify(), CheckpointDamage);
  fs::resize_file(shard, 3'000'000);  // while it is read: an error, not a signal
  EXPECT_THROW(reader.verify(), CheckpointDamage);
  for (const int64_t size : {header - 1, int64_t{0}}) expect_refused(size);
}

// ---- two processes

TEST_F(CheckpointFaults, ASecondProcessIsRefusedAndToldWhoHasTheFolder) {
  open_directory(folder);
  const CheckpointDirectory directory = open_directory(folder);
  EXPECT_EQ(log().find("taken over"), std::string::npos) << "it is free after a proper end: " << log();
  const int status = wait_for(start_child([&] {
    try {
      open_directory(folder);
      return 0;
    } catch (const Error& error) {
      const bool named = std::string(error.what()).find("process " + std::to_string(::getppid()) + ",") != std::string::npos;
      return named ? static_cast<int>(error.code()) : 1;
    }
  }));
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), static_cast<int>(ExitCode::environment));
}

TEST_F(CheckpointFaults, TheLockOfAKilledProcessIsTakenOverWithALine) {
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = start_child([&] {
    const CheckpointDirectory directory = open_directory(folder);
    const char ready = 1;
    if (::write(pipe[1], &ready, 1) == 1) ::pause();
    return 1;
  });
  char ready = 0;
  ASSERT_EQ(::read(pipe[0], &ready, 1), 1);
  ::kill(child, SIGKILL);
  wait_for(child);
  ::close(pipe[0]);
  ::close(pipe[1]);
  EXPECT_NO_THROW(open_directory(folder));
  EXPECT_THAT(log(), HasSubstr("process " + std::to_string(child) + ","));
  EXPECT_THAT(log(), HasSubstr("which did not end properly"));
}

}  // namespace mantissa::test::checkpoint_faults_test
