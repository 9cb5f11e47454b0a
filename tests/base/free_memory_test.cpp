// Free memory, according to files that look like those of /proc and of control groups.
#include <gmock/gmock.h>

#include "base/limits.h"
#include "files.h"

namespace mantissa::free_memory_test {

using ::testing::EndsWith;
using ::testing::Ge;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

class FreeMemoryTest : public ::testing::Test {
 protected:
  void write(const std::string& file, const std::string& content) const {
    const std::filesystem::path path = root_ / file;
    std::filesystem::create_directories(path.parent_path());
    test::write_file(path, content);
  }
  // The process is in /job/step of a hierarchy that is mounted at /sys/fs/cgroup.
  void version2(const std::string& path = "/job/step", const std::string& mounted = "/") const {
    write("proc/self/cgroup", "1:name=systemd:/elsewhere\n0::" + path + "\n");
    write("proc/self/mountinfo", "22 1 0:20 / /proc rw - proc proc rw\n31 22 0:26 " + mounted +
                                     " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void version1(const std::string& path = "/job/step", const std::string& mounted = "/") const {
    write("proc/self/cgroup", "0::/unified\n5:name=memory-of-jobs:/keeper\n4:cpu,memory:" + path + "\n3:cpuset:/other\n");
    write("proc/self/mountinfo",
          "30 22 0:25 / /sys/fs/cgroup/jobs rw - cgroup cgroup rw,name=memory-of-jobs\n"
          "31 22 0:26 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n32 22 0:27 " +
              mounted + " /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n");
  }
  void group(const std::string& folder, const std::string& limit, int64_t used, int64_t of_files = 0) const {
    write("sys/fs/cgroup/" + folder + "memory.max", limit + "\n");
    write("sys/fs/cgroup/" + folder + "memory.current", text(used, '\n'));
    write("sys/fs/cgroup/" + folder + "memory.stat", text("anon 5\ninactive_file ", of_files, "\nactive_file ", of_files, "\nslab 7\n"));
  }
  std::vector<FreeMemory> found() const { return free_memory(root_.path()); }

  test::TemporaryFolder root_;
};

TEST_F(FreeMemoryTest, OfTheHostIsWhatTheKernelCallsAvailable) {
  write("proc/meminfo", "MemTotal:       24000000 kB\nMemFree:         1000 kB\nMemAvailable:   2000000 kB\n");
  ASSERT_THAT(found(), SizeIs(1));
  EXPECT_EQ(found()[0].bytes, int64_t{2'000'000} * 1024);
  EXPECT_THAT(found()[0].of, StartsWith("host "));
  const uint64_t before = found()[0].place;
  write("proc/sys/kernel/random/boot_id", "6f1\n");
  EXPECT_NE(found()[0].place, before) << "hosts may have one name";
}

TEST_F(FreeMemoryTest, IsNotInventedWhereNothingSays) {
  EXPECT_THAT(found(), IsEmpty());
  EXPECT_FALSE(out_of_memory_kills(root_.path()));
  version2();
  EXPECT_THAT(found(), IsEmpty());
  group("job/step/", "max", 100);
  EXPECT_THAT(found(), IsEmpty()) << "no limit";
  version1();
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "5000\n");
  EXPECT_THAT(found(), IsEmpty()) << "none in the first version";
}

TEST_F(FreeMemoryTest, OfGroupsIsThatOfEachWithALimit) {
  write("proc/meminfo", "MemAvailable:   2000000 kB\n");
  version2();
  group("job/step/", "5000000", 1'000'000);
  ASSERT_THAT(found(), SizeIs(2));
  EXPECT_EQ(found()[1].bytes, 4'000'000);
  EXPECT_THAT(found()[1].of, EndsWith("/sys/fs/cgroup/job/step"));
  EXPECT_NE(found()[1].place, found()[0].place);
  group("job/", "9000000", 6'000'000);
  group("", "max", 7'000'000);
  ASSERT_THAT(found(), SizeIs(3));
  EXPECT_EQ(found()[1].bytes, 4'000'000);
  EXPECT_EQ(found()[2].bytes, 3'000'000) << "what groups beside this one use counts, too";
  EXPECT_THAT(found()[2].of, EndsWith("/sys/fs/cgroup/job"));
  EXPECT_NE(found()[2].place, found()[1].place);
  group("job/", "9000000", 10'000'000);
  EXPECT_EQ(found()[2].bytes, 0);
}

TEST_F(FreeMemoryTest, PagesOfFilesAreFree) {
  version2();
  group("job/step/", "5000000", 4'000'000, 1'500'000);
  EXPECT_EQ(found().at(0).bytes, 4'000'000);
  group("job/step/", "5000000", 1'000'000, 900'000);
  EXPECT_EQ(found().at(0).bytes, 5'000'000) << "not more than the limit: the counters are not of one moment";
}

TEST_F(FreeMemoryTest, OfTheFirstVersionOfGroupsIsRead) {
  version1();
  const std::string step = "sys/fs/cgroup/memory/job/step/";
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n");
  write(step + "memory.limit_in_bytes", "5000000\n");
  write(step + "memory.usage_in_bytes", "4000000\n");
  write(step + "memory.stat", "inactive_file 1\ntotal_inactive_file 300000\ntotal_active_file 200000\n");
  EXPECT_EQ(found().at(0).bytes, 1'500'000);
  for (const std::string folder : {"cpuset/", "cpuset/job/step/", "jobs/", "jobs/keeper/"}) {  // groups of other controllers
    write("sys/fs/cgroup/" + folder + "memory.limit_in_bytes", "1000\n");
    write("sys/fs/cgroup/" + folder + "memory.usage_in_bytes", "0\n");
  }
  EXPECT_EQ(found().at(0).bytes, 1'500'000);
  write(step + "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
  EXPECT_EQ(out_of_memory_kills(root_.path()), 3);
}

// The group that is mounted there is the container's, whatever its path is outside.
TEST_F(FreeMemoryTest, OfAContainerIsThatOfWhatItSees) {
  group("", "5000000", 1'000'000);
  for (const std::string outside : {"../a1/", "../"}) group(outside, "1000", 0);
  for (const auto& [path, mounted] : std::initializer_list<std::pair<const char*, const char*>>{
           {"/docker/a1", "/docker/a1"}, {"/docker/a1", "/docker/b2"}, {"/../a1", "/"}, {"/", "/"}}) {
    version2(path, mounted);
    EXPECT_EQ(found().at(0).bytes, 4'000'000) << path << ' ' << mounted;
    EXPECT_THAT(found().at(0).of, EndsWith("/sys/fs/cgroup"));
  }
  version2("/docker/a1/step", "/docker/a1");
  group("step/", "3000000", 0);
  EXPECT_EQ(found().at(0).bytes, 3'000'000);
}

TEST_F(FreeMemoryTest, KillsAreThoseOfTheNearestGroupThatCounts) {
  version2();
  write("sys/fs/cgroup/job/memory.events", "low 0\nhigh 0\nmax 9\noom 4\noom_kill 2\noom_group_kill 0\n");
  EXPECT_EQ(out_of_memory_kills(root_.path()), 2);
  write("sys/fs/cgroup/job/step/memory.events", "oom 0\noom_kill 0\n");
  EXPECT_EQ(out_of_memory_kills(root_.path()), 0);
}

TEST_F(FreeMemoryTest, KillsOfAProcessInAGroupBesideAreNotCounted) {
  version2();
  EXPECT_TRUE(counts_kills_of(7, root_.path())) << "nothing is known";
  write("sys/fs/cgroup/job/step/memory.events", "oom_kill 0\n");
  EXPECT_TRUE(counts_kills_of(7, root_.path())) << "nothing is known of the process";
  for (const auto& [path, counts] : std::initializer_list<std::pair<const char*, bool>>{{"/job/step", true},
                                                                                        {"/job/step/rank0", true},
                                                                                        {"/job/step2", false},
                                                                                        {"/job", false},
                                                                                        {"/system.slice/run-r7.scope", false},
                                                                                        {"/", false}}) {
    write("proc/7/cgroup", text("1:name=systemd:/elsewhere\n0::", path, '\n'));
    EXPECT_EQ(counts_kills_of(7, root_.path()), counts) << path;
  }
  write("proc/7/cgroup", "0::/job/other\n");
  std::filesystem::remove(root_ / "sys/fs/cgroup/job/step/memory.events");
  write("sys/fs/cgroup/job/memory.events", "oom_kill 0\n");
  EXPECT_TRUE(counts_kills_of(7, root_.path())) << "the group above both counts";
}

// Here the hierarchy says of each process that has ended that it was at the top.
TEST_F(FreeMemoryTest, KillsOfTheFirstVersionOfGroupsAreTakenForThoseOfAll) {
  version1();
  write("sys/fs/cgroup/memory/job/step/memory.oom_control", "oom_kill 3\n");
  write("proc/7/cgroup", "4:cpu,memory:/\n");
  EXPECT_TRUE(counts_kills_of(7, root_.path()));
}

TEST_F(FreeMemoryTest, PeakIsThatOfTheProgramAndNotOfTheProcess) {
  write("proc/self/status", "Name:\tmantissa\nVmPeak:\t  900 kB\nVmHWM:\t   500 kB\nVmRSS:\t  300 kB\n");
  EXPECT_EQ(peak_resident_bytes(root_.path()), 500 * 1024);
  EXPECT_GT(peak_resident_bytes(), 1 << 20);
}

TEST(FreeMemory, OfThisHostIsThere) {
  ASSERT_THAT(free_memory(), SizeIs(Ge(1U)));
  EXPECT_GT(free_memory()[0].bytes, 1 << 20);
}

}  // namespace mantissa::free_memory_test
