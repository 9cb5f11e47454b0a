// Changes of a file that are seen: each of those that leave all but one trace of it alone.
#include <dlfcn.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cstring>
#include <functional>
#include <optional>

#include "files.h"
#include "io/safetensors.h"

// The answer of the system for the path "told", if any: no trace of real files changes alone.
static std::optional<struct stat> reported;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

extern "C" int injected_stat(const char* path, struct stat* status) __asm__("stat");
extern "C" int injected_stat(const char* path, struct stat* status) {
  static const auto next = reinterpret_cast<int (*)(const char*, struct stat*)>(::dlsym(RTLD_NEXT, "stat"));
  if (!reported || std::strcmp(path, "told") != 0) return next(path, status);
  *status = *reported;
  return 0;
}

namespace mantissa::unchanged_files_test {

namespace fs = std::filesystem;
using test::error_of;
using ::testing::StartsWith;

class UnchangedFilesTest : public ::testing::Test {
 protected:
  UnchangedFilesTest() { test::write_file(file_, "as it was"); }

  void expect_seen() {
    const Error error = error_of([&] { seen_.require_unchanged(); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), StartsWith(file_ + ": was changed or replaced"));
    EXPECT_EQ(error_of([&] { seen_.look_at(file_); }).code(), ExitCode::data);
  }
  // The time of change is the kernel's own: it moves with every call.
  static void set_times(const std::string& path, const struct stat& status) {
    const timespec times[] = {status.st_atim, status.st_mtim};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
  }

  test::TemporaryFolder folder_;
  std::string file_ = folder_ / "file";
  UnchangedFiles seen_;
};

TEST_F(UnchangedFilesTest, StayWhatTheyAreWhileOnlyReadAndWhereNothingIs) {
  const std::string missing = folder_ / "missing", below_a_file = file_ + "/missing";
  for (int i = 0; i < 2; ++i) {
    for (const std::string& path : {file_, missing, below_a_file}) EXPECT_NO_THROW(seen_.look_at(path));
    EXPECT_EQ(test::read_file(file_), "as it was");
    EXPECT_NO_THROW(seen_.require_unchanged());
  }
  test::write_file(missing, "");
  EXPECT_EQ(error_of([&] { seen_.require_unchanged(); }).code(), ExitCode::data) << "it came";
}

TEST(UnchangedFiles, EachTraceAloneTells) {
  const std::vector<std::function<void(struct stat&)>> changes = {
      [](struct stat& s) { ++s.st_dev; },         [](struct stat& s) { ++s.st_ino; },          [](struct stat& s) { ++s.st_size; },
      [](struct stat& s) { ++s.st_mtim.tv_sec; }, [](struct stat& s) { ++s.st_mtim.tv_nsec; }, [](struct stat& s) { ++s.st_ctim.tv_sec; },
      [](struct stat& s) { ++s.st_ctim.tv_nsec; }};
  for (size_t i = 0; i < changes.size(); ++i) {
    reported.emplace();
    UnchangedFiles seen;
    for (int times = 0; times < 2; ++times) EXPECT_NO_THROW(seen.look_at("told"));
    changes[i](*reported);
    EXPECT_EQ(error_of([&] { seen.look_at("told"); }).code(), ExitCode::data) << i;
  }
  reported.reset();
}

TEST_F(UnchangedFilesTest, AreNotThoseWhoseTimesWereSetBackOrThatWentAway) {
  seen_.look_at(file_);
  struct stat status {};
  ASSERT_EQ(::stat(file_.c_str(), &status), 0);
  test::write_file(file_, "otherwise");
  set_times(file_, status);
  expect_seen();
  fs::remove(file_);
  expect_seen();
}

// The name is the same, and what it leads to is another file.
TEST_F(UnchangedFilesTest, AreNotThoseThatALinkNoLongerLeadsTo) {
  const std::string target = folder_ / "target", other = folder_ / "other";
  test::write_file(target, "target");
  test::write_file(other, "other!");
  fs::remove(file_);
  fs::create_symlink(target, file_);
  seen_.look_at(file_);
  test::write_file(target, "changed where it lies");
  expect_seen();
  fs::remove(file_);
  fs::create_symlink(other, file_);
  expect_seen();
}

TEST_F(UnchangedFilesTest, EveryOneOfThemIsLookedAtAgain) {
  const std::string first = folder_ / "a";
  test::write_file(first, "first");
  seen_.look_at(first);
  seen_.look_at(file_);
  test::write_file(file_, "longer than it was");
  expect_seen();
  EXPECT_NO_THROW(seen_.look_at(first));
  const std::string loop = folder_ / "loop";
  fs::create_symlink("loop", loop);
  EXPECT_EQ(error_of([&] { seen_.look_at(loop); }).code(), ExitCode::usage) << "the system cannot tell";
}

}  // namespace mantissa::unchanged_files_test
