// What a user may name by mistake: loops of links, names that are too long, folders, sockets and pipes where a file is wanted.
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "process.h"
#include "training.h"

namespace mantissa::odd_paths_test {

using ::testing::HasSubstr;

class OddPaths : public test::TrainingTest {
 protected:
  OddPaths() {
    test::write_file(folder_ / "run.json", effective_config(config("run", {"training.steps=1", "data.tokenizer=byte"}).config));
    std::filesystem::create_symlink("loop", folder_ / "loop");
    std::filesystem::create_directory(folder_ / "folder");
    EXPECT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    const std::string socket = folder_ / "socket";
    socket.copy(address.sun_path, sizeof address.sun_path - 1);
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ::close(fd);
  }

  // As a user types it, at most 20 seconds: a pipe that is opened for reading waits for its writer.
  test::ProcessResult mantissa(const std::string& arguments) const {
    return test::run_process({"bash", "-c", "exec timeout 20 " MANTISSA_BINARY " " + arguments}, folder_.path());
  }

  void expect_usage_error(const std::string& arguments) const {
    const auto run = mantissa(arguments);
    EXPECT_EQ(run.exit_code, 2) << arguments.substr(0, 200) << '\n' << run.errors.substr(0, 500);
    EXPECT_THAT(run.errors, HasSubstr("error: ")) << arguments.substr(0, 200);
  }

  const std::vector<std::string> no_folders_ = {
      "loop", "pipe", "socket", "loop/x", "socket/x", std::string(300, 'y'), std::string(5000, 'z')};
  // Nor files.
  const std::vector<std::string> odd_ = [this] {
    std::vector<std::string> all = no_folders_;
    all.emplace_back("folder");
    return all;
  }();
};

TEST_F(OddPaths, WhereAConfigIsWantedAreUsageErrors) {
  for (const std::string& path : odd_) {
    for (const char* const command : {"train ", "config check ", "train run.json --set-file "}) expect_usage_error(command + path);
  }
}

TEST_F(OddPaths, WhereAnInputIsWantedAreUsageErrors) {
  for (const std::string& path : odd_) {
    expect_usage_error("config check run.json --set data.path=" + path);
    expect_usage_error(
        "config check run.json --set data.path=null --set data.valid_fraction=0.1 --set data.train.0.path=text.txt --set "
        "data.valid.0.path=" +
        path);
    expect_usage_error("tokenize --output out " + path);
    expect_usage_error("tokenize --tokenizer char --output out text.txt --vocabulary " + path);
  }
}

TEST_F(OddPaths, WhereACheckpointOrAFolderIsWantedAreUsageErrors) {
  for (const std::string& path : no_folders_) {
    for (const char* const command : {"eval ", "verify ", "inspect ", "report ", "conformance ", "inspect --diff folder "})
      expect_usage_error(command + path);
    for (const char* const key : {"checkpoint.init_from=", "checkpoint.resume="})
      expect_usage_error(std::string("train run.json --set ") + key + path);
  }
}

TEST_F(OddPaths, WhereTheRunIsToBeWrittenAreUsageErrors) {
  for (const std::string& path : no_folders_) {
    for (const char* const key : {"checkpoint.dir=", "logging.dir="}) {
      expect_usage_error(std::string("train run.json --set ") + key + path);
      expect_usage_error(std::string("train run.json --resume --set ") + key + path);
    }
  }
}

TEST_F(OddPaths, WhereAFileIsToBeWrittenAreUsageErrorsAndStayAsTheyAre) {
  ASSERT_EQ(mantissa("train run.json --set logging.dir=trained").exit_code, 0);
  for (const std::string& path : odd_) {
    expect_usage_error("report trained --output " + path);
    expect_usage_error("bench gemm --json " + path);
  }
  expect_usage_error("report trained --output missing/page.html");
  expect_usage_error("report trained --output ''");
  expect_usage_error("report trained --output " + std::string(253, 'a'));  // with .tmp it is too long
  EXPECT_THAT(mantissa("report trained --output missing/page.html").errors, HasSubstr("missing/page.html: there is no folder missing"));
  for (const char* const prefix : {"loop/x", "missing/x"}) expect_usage_error(std::string("tokenize text.txt --output ") + prefix);
  std::filesystem::create_directory(folder_ / "taken.idx");
  expect_usage_error("tokenize text.txt --output taken");
  EXPECT_TRUE(std::filesystem::is_symlink(folder_ / "loop"));
  EXPECT_TRUE(std::filesystem::is_fifo(folder_ / "pipe"));
  EXPECT_TRUE(std::filesystem::is_socket(folder_ / "socket"));
}

TEST_F(OddPaths, FolderThatIsGoneIsNoInternalError) {
  const std::string check = MANTISSA_BINARY " config check " + (folder_ / "run.json") + " --set data.path=text.txt";
  const auto run = test::run_process({"bash", "-c", "rmdir ../folder; exec " + check}, folder_ / "folder");
  EXPECT_EQ(run.exit_code, 2) << run.errors;
}

}  // namespace mantissa::odd_paths_test
