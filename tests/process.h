// Programs as children of a test: run to their end, or beside the test, which sends them signals.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "files.h"
#include "mantissa/base/error.h"

namespace mantissa::test {

struct ProcessResult {
  int exit_code = -1;  // 128 + n when signal n ended it
  std::string output;  // standard output
  std::string errors;  // standard error
};

// Runs words[0] (a path, or a name in PATH) in `directory` with empty standard input.
inline ProcessResult run_process(std::vector<std::string> words, const std::filesystem::path& directory) {
  const TemporaryFolder folder;
  const std::string output = folder / "out", errors = folder / "err";
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    const int in = ::open("/dev/null", O_RDONLY);
    const int out = ::open(output.c_str(), O_WRONLY | O_CREAT, 0600);
    const int err = ::open(errors.c_str(), O_WRONLY | O_CREAT, 0600);
    if (::chdir(directory.c_str()) != 0 || ::dup2(in, 0) < 0 || ::dup2(out, 1) < 0 || ::dup2(err, 2) < 0) ::_exit(126);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return {code, read_file(output), read_file(errors)};
}

inline ProcessResult run_mantissa(std::vector<std::string> arguments, const std::filesystem::path& directory) {
  // A pack of tests for another machine has the program beside them.
  const std::filesystem::path beside = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "mantissa";
  arguments.insert(arguments.begin(), std::filesystem::exists(beside) ? beside.string() : MANTISSA_BINARY);
  return run_process(std::move(arguments), directory);
}

// Runs body in a child process; its return value is the exit status.
template <class Body>
pid_t start_child(Body&& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  int status = 70;
  try {
    status = body();
  } catch (const Error& error) {
    status = static_cast<int>(error.code());
  }
  ::_exit(status);
}

inline int wait_for(pid_t pid) {
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return status;
}

// The process numbers of those that the main thread of `parent` started.
inline std::vector<std::string> children_of(pid_t parent) {
  std::istringstream numbers(read_file(text("/proc/", parent, "/task/", parent, "/children")));
  return {std::istream_iterator<std::string>(numbers), {}};
}

// Until a process that is nobody's child here has ended, waited for or not; false if it does not within a minute.
inline bool ends(pid_t process) {
  const auto runs = [&] {
    std::error_code gone;
    return ::kill(process, 0) == 0 && !std::filesystem::read_symlink(text("/proc/", process, "/exe"), gone).empty();
  };
  for (int i = 0; i < 6000 && runs(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return !runs();
}

// Runs words[0] in `directory` beside the test, its output and errors appended to the file `output`. Killed with this object.
class BackgroundProcess {
 public:
  BackgroundProcess(std::vector<std::string> words, const std::filesystem::path& directory, const std::string& output) : output_(output) {
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    child_ = ::fork();
    if (child_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = ::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (::chdir(directory.c_str()) != 0 || ::dup2(out, 1) < 0 || ::dup2(out, 2) < 0) ::_exit(126);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ~BackgroundProcess() {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
    }
  }
  BackgroundProcess(const BackgroundProcess&) = delete;
  BackgroundProcess& operator=(const BackgroundProcess&) = delete;

  pid_t pid() const { return child_; }
  void send(int signal) const { ASSERT_EQ(::kill(child_, signal), 0); }
  std::string output() const { return std::filesystem::exists(output_) ? read_file(output_) : ""; }

  // Until the output holds this; false if it does not within a minute.
  bool prints(const std::string& what) const {
    for (int i = 0; i < 6000 && output().find(what) == std::string::npos; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return output().find(what) != std::string::npos;
  }

  // 128 + n when signal n ended it.
  int wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(child_, &status, 0), child_);
    child_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  std::string output_;
  pid_t child_ = -1;
};

}  // namespace mantissa::test
