// mantissa launch does not start again and again what dies for want of memory.
#include <gmock/gmock.h>

#include "launcher.h"

namespace mantissa::launch_memory_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// In a namespace whose control groups are files of this test.
class LaunchMemory : public test::LaunchTest {
 protected:
  static constexpr const char* kHide = "mount -t tmpfs none /sys/fs/cgroup || exit 77; ";
  // Counters of whichever version is mounted; the groups are those at the top.
  static constexpr const char* kCount =
      "count() { for f in unified/memory.events memory.events memory/memory.oom_control; do mkdir -p /sys/fs/cgroup/$(dirname $f); "
      "echo oom_kill $1 > /sys/fs/cgroup/$f; done; }; ";

  void SetUp() override {
    const auto tried = test::run_process({"unshare", "-rm", "sh", "-c", kHide}, folder_.path());
    if (tried.exit_code != 0) GTEST_SKIP() << "control groups cannot be hidden here: " << tried.errors;
  }
  test::ProcessResult launch_within(const std::string& prepare, const std::string& script) const {
    return test::run_process({"unshare", "-rm", "sh", "-c", prepare + "exec \"$@\"", "sh", MANTISSA_BINARY, "launch", "--max-restarts", "9",
                              "--", "sh", "-c", script},
                             folder_.path());
  }
};

// A step that its rank reports, as report_step() does.
std::string reports_step(const std::string& step) {
  return "python3 -c 'import os; os.pwrite(int(os.environ[\"MANTISSA_STEP_FD\"]), (" + step + ").to_bytes(8, \"little\"), 0)'; ";
}

TEST_F(LaunchMemory, TwoDeathsByTheOutOfMemoryKillerAreTheLast) {
  const std::string dies = reports_step("7 + int(os.environ[\"TORCHELASTIC_RESTART_COUNT\"])") + "kill -9 $$";
  const auto run = launch_within(text(kHide, kCount, "count 4; "), text(kCount, "count $((5 + TORCHELASTIC_RESTART_COUNT)); ", dies));
  EXPECT_EQ(run.exit_code, 137) << run.errors;
  EXPECT_THAT(run.errors,
              AllOf(HasSubstr("the kernel's out-of-memory killer ended it"), HasSubstr("restart 1 of 9"),
                    HasSubstr("no restart: the kernel killed two attempts in a row for want of memory"), Not(HasSubstr("restart 2 of 9"))));
}

TEST_F(LaunchMemory, ADeathBetweenThemOrOfAnotherKindIsNoneForWantOfMemory) {
  const std::string kills = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || count $((5 + TORCHELASTIC_RESTART_COUNT)); ";
  const auto apart =
      launch_within(text(kHide, kCount, "count 4; "), text("[ $TORCHELASTIC_RESTART_COUNT = 3 ] && exit 0; ", kCount, kills, "kill -9 $$"));
  EXPECT_EQ(apart.exit_code, 0) << apart.errors;
  const auto another = launch_within(text(kHide, kCount, "count 4; "), text("[ $TORCHELASTIC_RESTART_COUNT = 3 ] && exit 0; ", kCount,
                                                                            "count $((5 + TORCHELASTIC_RESTART_COUNT)); exit 70"));
  EXPECT_EQ(another.exit_code, 0) << "what was killed was another process" << another.errors;
}

// As systemd-run --scope and cgexec do: in a group of version 2 beside that of the launcher, whose counter stands still.
TEST_F(LaunchMemory, ADeathInAGroupBesideCountsBeforeANewStep) {
  const std::string in_groups = R"(
    seen=/sys/fs/cgroup; [ -e $seen/cgroup.procs ] || seen=$seen/unified
    mount --bind $seen real && own=$PWD/real$(sed -n 's/^0:://p' /proc/self/cgroup) || exit 77
    trap 'echo $$ > $own/cgroup.procs; rmdir $own/launcher.$$ $own/rank.$$ 2>/dev/null' EXIT
    mkdir $own/launcher.$$ $own/rank.$$ && echo $$ > $own/launcher.$$/cgroup.procs && export RANK_GROUP=$own/rank.$$ || exit 77
    mount -t tmpfs none /sys/fs/cgroup
    fake=$seen$(sed -n 's/^0:://p' /proc/self/cgroup)
    mkdir -p $fake && echo oom_kill 4 > $fake/memory.events
    "$@"
    exit $?)";
  std::filesystem::create_directory(folder_ / "real");
  const auto run = test::run_process({"unshare", "-rm", "sh", "-c", in_groups, "sh", MANTISSA_BINARY, "launch", "--max-restarts", "9", "--",
                                      "sh", "-c", "echo $$ > $RANK_GROUP/cgroup.procs && kill -9 $$"},
                                     folder_.path());
  if (run.exit_code == 77) GTEST_SKIP() << "no groups can be made here: " << run.errors;
  EXPECT_EQ(run.exit_code, 137) << run.errors;
  EXPECT_THAT(run.errors, AllOf(HasSubstr("restart 1 of 9"), HasSubstr("before a new step, perhaps for want of memory"),
                                Not(HasSubstr("restart 2 of 9"))));
}

TEST_F(LaunchMemory, WhereTheKernelDoesNotSayADeathBeforeANewStepCounts) {
  const auto early = launch_within(kHide, "kill -9 $$");
  EXPECT_EQ(early.exit_code, 137) << early.errors;
  EXPECT_THAT(early.errors, AllOf(HasSubstr("restart 1 of 9"), HasSubstr("before a new step, perhaps for want of memory"),
                                  Not(HasSubstr("restart 2 of 9"))));
  const std::string steps = reports_step("1 + int(os.environ[\"TORCHELASTIC_RESTART_COUNT\"])");
  const auto late = launch_within(kHide, steps + "[ $TORCHELASTIC_RESTART_COUNT = 4 ] && exit 0; kill -9 $$");
  EXPECT_EQ(late.exit_code, 0) << late.errors;
  const auto other = launch_within(kHide, "[ $TORCHELASTIC_RESTART_COUNT = 3 ] && exit 0; kill -SEGV $$");
  EXPECT_EQ(other.exit_code, 0) << other.errors;
}

}  // namespace mantissa::launch_memory_test
