// Files that grow under a limit on file sizes, which cuts a write short before one fails, and files that are replaced.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <csignal>

#include "base/file.h"
#include "files.h"
#include "mantissa/base/log.h"
#include "metrics/run_folder.h"

namespace mantissa::append_file_test {

using ::testing::HasSubstr;

// No file of this process grows beyond so many bytes.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

class AppendFileTest : public testing::Test {
 protected:
  AppendFileTest() { open_log({.console = false, .file = folder_ / "log.txt"}); }
  ~AppendFileTest() override { close_log(); }

  test::TemporaryFolder folder_;
  const std::string first_ = std::string(2999, 'a') + "\n", second_ = std::string(2999, 'b') + "\n";
};

TEST_F(AppendFileTest, RecordThatIsCutShortIsTakenBackAndCounted) {
  AppendFile file(folder_ / "lines");
  file.append(first_);
  {
    const FileSizeLimit limit(4096);
    file.append(second_);
    file.append(second_);
  }
  EXPECT_EQ(file.failures(), 2);
  EXPECT_EQ(test::read_file(folder_ / "lines"), first_);
  file.append(second_);
  EXPECT_EQ(test::read_file(folder_ / "lines"), first_ + second_);
  EXPECT_EQ(file.failures(), 2);
}

TEST_F(AppendFileTest, AFullDiskIsCountedAndNotThrown) {
  AppendFile file("/dev/full");
  for (int i = 0; i < 3; ++i) file.append("{}\n");
  EXPECT_EQ(file.failures(), 3);
}

TEST_F(AppendFileTest, WarningGivesTheReasonOfTheSystemOnce) {
  AppendFile file(folder_ / "lines");
  file.append(first_);
  {
    const FileSizeLimit limit(4096);
    file.append(second_);
    file.append(second_);
  }
  const std::string log = test::read_file(folder_ / "log.txt");
  EXPECT_THAT(log, HasSubstr("lines: writing failed: File too large"));
  EXPECT_EQ(log.find("writing failed"), log.rfind("writing failed"));
}

TEST_F(AppendFileTest, MetricsCountWhatEitherOfTheirFilesDrops) {
  for (const bool lines : {false, true}) {
    for (const bool events : {false, true}) {
      const std::string folder = folder_ / text(lines, events);
      std::filesystem::create_directory(folder);
      Metrics metrics({.run_name = {}, .dir = folder, .jsonl = lines, .tensorboard = events});
      const FileSizeLimit limit(64);  // more than the head of an event file
      for (int i = 0; i < 3; ++i) metrics.write(StepEvent{.mfu = {}});
      EXPECT_EQ(metrics.dropped(), 3 * (lines + events)) << lines << events;
    }
  }
}

TEST_F(AppendFileTest, LogLinesThatCannotBeWrittenAreCounted) {
  log_info("a line that is there");
  const int64_t before = dropped_log_lines();
  {
    const FileSizeLimit limit(64);
    log_info(first_);
    log_info(second_);
  }
  EXPECT_EQ(dropped_log_lines() - before, 2);
  log_info("another one");
  EXPECT_EQ(dropped_log_lines() - before, 2);
  EXPECT_THAT(test::read_file(folder_ / "log.txt"), HasSubstr("another one\n"));
}

TEST(PendingFile, TellsWhyTheOldTemporaryFileIsInTheWay) {
  const test::TemporaryFolder folder;
  std::filesystem::create_directory(folder / "page.html.tmp");
  const Error error = test::error_of([&] { write_file_atomically(folder / "page.html", "text"); });
  EXPECT_EQ(error.code(), ExitCode::storage);
  EXPECT_THAT(error.what(), ::testing::EndsWith("removing the old file failed: Is a directory"));
}

}  // namespace mantissa::append_file_test
