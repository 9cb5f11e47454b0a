// Runs a program and waits for it: what it wrote and how it ended.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "files.h"

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
  arguments.insert(arguments.begin(), MANTISSA_BINARY);
  return run_process(std::move(arguments), directory);
}

}  // namespace mantissa::test
