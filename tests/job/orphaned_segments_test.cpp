// Files of shared memory that are taken for leftovers of killed processes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "files.h"
#include "job/launch.h"

namespace mantissa::orphaned_segments_test {

namespace fs = std::filesystem;

constexpr const char* kSegment = "ucx_shm_posix_1b4063a8";
constexpr int64_t kBytes = 4096;

class OrphanedSegmentsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const int fd = ::open(folder_.path().c_str(), O_TMPFILE | O_RDWR, 0600);
    const bool leases = fd >= 0 && ::fcntl(fd, F_SETLEASE, F_WRLCK) == 0;
    ::close(fd);
    if (!leases) GTEST_SKIP() << "SKIPPED: the file system of " << folder_.path() << " grants no leases; set TMPDIR";
  }
  std::string segment(const std::string& name = kSegment, int64_t bytes = kBytes) const {
    test::write_file(folder_ / name, std::string(static_cast<size_t>(bytes), 'x'));
    return folder_ / name;
  }
  bool is_left() const { return fs::exists(folder_ / kSegment); }
  int removed() const { return remove_orphaned_segments(folder_.path()).count; }

  test::TemporaryFolder folder_;
};

TEST_F(OrphanedSegmentsTest, AreThoseThatNobodyHasOpenOrMapped) {
  const std::string file = segment();
  segment("ucx_shm_posix_7", 3 * kBytes);
  const int fd = ::open(file.c_str(), O_RDWR);
  EXPECT_EQ(remove_orphaned_segments(folder_.path()).bytes, 3 * kBytes) << "the other is open";
  void* const memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  EXPECT_EQ(removed(), 0) << "mapped and closed";
  const pid_t child = ::fork();
  if (child == 0) ::pause();
  ::munmap(memory, kBytes);
  EXPECT_EQ(removed(), 0) << "of another process";
  EXPECT_TRUE(is_left());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(removed(), 1) << "it was killed";
  EXPECT_TRUE(fs::is_empty(folder_.path()));
  EXPECT_EQ(remove_orphaned_segments(folder_ / "none").count, 0);
}

TEST_F(OrphanedSegmentsTest, AreNoNewOnesNorOtherFilesNorThoseOfOthers) {
  const std::string empty = segment("ucx_shm_posix_1", 0), other = segment("psm2_shm.1");
  fs::create_symlink(other, folder_ / kSegment);
  ::mkfifo((folder_ / "ucx_shm_posix_2").c_str(), 0600);
  fs::create_directory(folder_ / "ucx_shm_posix_3");
  const bool gives = ::chown(segment("ucx_shm_posix_4").c_str(), 12345, 12345) == 0;  // only root can make files of others
  EXPECT_EQ(removed(), gives ? 0 : 1);
  EXPECT_TRUE(fs::exists(other) && is_left());
  fs::last_write_time(empty, fs::last_write_time(empty) - std::chrono::minutes(2));
  EXPECT_EQ(removed(), 1) << "empty and old";
}

// Two that start at the same time look at the same files; opening a file takes away the lease of the other.
TEST_F(OrphanedSegmentsTest, MayBeLookedForByTwoAtATime) {
  const pid_t child = ::fork();
  for (int i = 0; i < 500; ++i) {
    segment();
    removed();
  }
  if (child == 0) ::_exit(0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace mantissa::orphaned_segments_test
