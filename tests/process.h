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
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "files.h"
#include "hang.h"
#include "mantissa/base/error.h"

namespace mantissa::test {

struct ProcessResult {
  int exit_code = -1;  // 128 + n when signal n ended it
  std::string output;  // standard output
  std::string errors;  // standard error
};

inline int exit_code(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

inline std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> out;
  for (std::string& word : words) out.push_back(word.data());
  out.push_back(nullptr);
  return out;
}

// Runs in the child: becomes words[0] (a path, or a name in PATH) in `directory`, with empty standard input, and appends its output and
// errors to these files.
[[noreturn]] inline void become(const std::vector<char*>& words, const std::filesystem::path& directory, const std::string& output,
                                const std::string& errors) {
  const int in = ::open("/dev/null", O_RDONLY);
  const int out = ::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  const int err = ::open(errors.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (::chdir(directory.c_str()) != 0 || ::dup2(in, 0) < 0 || ::dup2(out, 1) < 0 || ::dup2(err, 2) < 0) ::_exit(126);
  ::execvp(words[0], words.data());
  ::_exit(127);
}

inline ProcessResult run_process(std::vector<std::string> words, const std::filesystem::path& directory) {
  const TemporaryFolder folder;
  const std::string output = folder / "out", errors = folder / "err";
  const std::vector<char*> arguments = pointers(words);
  const pid_t child = ::fork();
  if (child == 0) become(arguments, directory, output, errors);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return {exit_code(status), read_file(output), read_file(errors)};
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

// Waits until a process that is nobody's child here has ended, waited for or not; false if it does not.
inline bool ends(pid_t process) {
  const auto runs = [&] {
    std::error_code gone;
    return ::kill(process, 0) == 0 && !std::filesystem::read_symlink(text("/proc/", process, "/exe"), gone).empty();
  };
  return eventually([&] { return !runs(); });
}

// Runs words[0] in `directory` beside the test, its output and errors appended to the file `output`. Killed with this object.
class BackgroundProcess {
 public:
  BackgroundProcess(std::vector<std::string> words, const std::filesystem::path& directory, const std::string& output) : output_(output) {
    const std::vector<char*> arguments = pointers(words);
    child_ = ::fork();
    if (child_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    become(arguments, directory, output, output);
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

  // Waits until the output holds this; false if it does not.
  bool prints(const std::string& what) const {
    return eventually([&] { return output().find(what) != std::string::npos; });
  }

  // Waits until it has ended, and is still to be waited for; false if it does not.
  bool ends() const {
    return eventually([&] {
      siginfo_t info{};
      return ::waitid(P_PID, static_cast<id_t>(child_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == child_;
    });
  }

  // Waits for the end. Returns the exit code; 128 + n when signal n ended it.
  int wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(child_, &status, 0), child_);
    child_ = -1;
    return exit_code(status);
  }

 private:
  std::string output_;
  pid_t child_ = -1;
};

}  // namespace mantissa::test
