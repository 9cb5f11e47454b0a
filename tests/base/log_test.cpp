// The records that reach the log file.
#include "mantissa/base/log.h"

#include <gmock/gmock.h>

#include "files.h"

namespace mantissa::log_test {

using ::testing::HasSubstr;
using ::testing::Not;

class LogTest : public ::testing::Test {
 protected:
  ~LogTest() override { close_log(); }

  void open_without_file() const { open_log({.console = false, .file = {}}); }
  void open_with_file() const { open_log({.console = false, .file = folder_ / "log.txt"}); }
  std::string written() const { return test::read_file(folder_ / "log.txt"); }

 private:
  test::TemporaryFolder folder_;
};

TEST_F(LogTest, RecordsBeforeTheFileWasNamedComeFirstInIt) {
  open_without_file();
  write_log(LogLevel::debug, "below the level");
  log_warning("early");
  open_with_file();
  log_info("late");
  EXPECT_THAT(written(), ::testing::ContainsRegex("^[-0-9: ]+ warning early\n[-0-9: ]+ info late\n$"));
}

TEST_F(LogTest, RecordsAreKeptForOneFileOnly) {
  open_without_file();
  log_warning("early");
  open_with_file();
  open_with_file();
  open_without_file();
  log_warning("of a closed log");
  close_log();
  open_with_file();
  EXPECT_THAT(written(), ::testing::ContainsRegex("^[^\n]+ early\n$"));
}

TEST_F(LogTest, WhoSpeaksIsSaidBeforeTheMessageUntilTheNextOpening) {
  open_log({.console = false, .file = {}, .who = "rank 3: "});
  log_warning("a {} brace");
  open_with_file();
  log_warning("late");
  EXPECT_THAT(written(), HasSubstr(" warning rank 3: a {} brace\n"));
  EXPECT_THAT(written(), HasSubstr(" warning late\n"));
}

TEST_F(LogTest, OfManyRecordsTheNewestThousandAreKept) {
  open_without_file();
  for (int i = 1; i <= 1200; ++i) log_info("record ", i, ".");
  open_with_file();
  const std::string lines = written();
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 1000);
  EXPECT_THAT(lines, Not(HasSubstr("record 200.")));
  EXPECT_THAT(lines, HasSubstr("record 201."));
}

}  // namespace mantissa::log_test
