// mantissa launch does not start again and again a job that dies for want of memory.
#include <gmock/gmock.h>

#include "launcher.h"

namespace mantissa::launch_memory_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Runs in a namespace whose control groups are files of this test.
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
  struct Case {
    std::string prepare, script;
    int code;
    std::vector<std::string> says;
    std::string without = {};
  };
  void expect(const Case& each) const {
    const auto run = test::run_process({"unshare", "-rm", "sh", "-c", each.prepare + "exec \"$@\"", "sh", MANTISSA_BINARY, "launch",
                                        "--max-restarts", "9", "--", "sh", "-c", each.script},
                                       folder_.path());
    EXPECT_EQ(run.exit_code, each.code) << each.script << run.errors;
    for (const std::string& what : each.says) EXPECT_THAT(run.errors, HasSubstr(what));
    if (!each.without.empty()) {
      EXPECT_THAT(run.errors, Not(HasSubstr(each.without)));
    }
  }
};

// A step that its rank reports, like report_step().
std::string reports_step(const std::string& step) {
  return "python3 -c 'import os; os.pwrite(int(os.environ[\"MANTISSA_STEP_FD\"]), (" + step +
         " + int(os.environ[\"TORCHELASTIC_RESTART_COUNT\"])).to_bytes(8, \"little\"), 0)'; ";
}

TEST_F(LaunchMemory, TwoDeathsInARowForWantOfItAreTheLast) {
  const std::string counted = text(kHide, kCount, "count 4; "), counts = text(kCount, "count $((5 + TORCHELASTIC_RESTART_COUNT)); ");
  const auto until = [](int attempt) { return text("[ $TORCHELASTIC_RESTART_COUNT = ", attempt, " ] && exit 0; "); };
  const std::string perhaps = "before a new step, perhaps because memory ran out";
  const std::vector<Case> cases = {
      {counted,
       counts + reports_step("7") + "kill -9 $$",
       137,
       {"the kernel's out-of-memory killer killed a rank", "restart 1 of 9",
        "no restart: the kernel killed two attempts in a row because memory ran out"},
       "restart 2 of 9"},
      // A death between them, and one of another process.
      {counted, until(3) + kCount + "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || count $((5 + TORCHELASTIC_RESTART_COUNT)); kill -9 $$", 0, {}},
      {counted, until(3) + counts + "exit 70", 0, {}},
      // A death before a new step counts where the kernel does not say.
      {kHide, "kill -9 $$", 137, {"restart 1 of 9", perhaps}, "restart 2 of 9"},
      {kHide, reports_step("1") + until(4) + "kill -9 $$", 0, {}},
      {kHide, until(3) + "kill -SEGV $$", 0, {}}};
  for (const Case& each : cases) expect(each);
}

// The worker is in a group of version 2 beside that of the launcher, whose counter stands still: systemd-run --scope and cgexec do so.
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
  EXPECT_THAT(run.errors, AllOf(HasSubstr("restart 1 of 9"), HasSubstr("before a new step, perhaps because memory ran out"),
                                Not(HasSubstr("restart 2 of 9"))));
}

}  // namespace mantissa::launch_memory_test
