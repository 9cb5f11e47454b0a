// Error messages as files of tests/golden/errors. Each line is a case, "input => exit code, message", with ␤ for a line end; lines that are
// empty or begin with # are for readers. scripts/golden_errors.sh renews what stands behind the inputs: look at the difference before
// committing.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <functional>
#include <sstream>
#include <string>

#include "base/file.h"
#include "files.h"

namespace mantissa::test {

inline std::string replaced(std::string in, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = in.find(from, at)) != std::string::npos; at += to.size()) in.replace(at, from.size(), to);
  return in;
}

// "code, message" of the error that the action throws, as the program would report it; "0" if it throws none.
inline std::string outcome_of(const std::function<void()>& action) {
  try {
    action();
    return "0";
  } catch (const Error& error) {
    return text(static_cast<int>(error.code()), ", ", error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    return text(static_cast<int>(path_failure(error.code().value())), ", ", error.what());
  }
}

// Compares outcome(input) with what stands behind each input of tests/golden/errors/NAME.txt.
inline void expect_messages(const std::string& name, const std::function<std::string(const std::string&)>& outcome) {
  const std::string path = text(MANTISSA_SOURCE_DIR, "/tests/golden/errors/", name, ".txt");
  const bool renew = ::getenv("MANTISSA_RENEW_ERRORS") != nullptr;
  std::istringstream golden(read_file(path));
  std::string renewed;
  size_t cases = 0;
  for (std::string line; std::getline(golden, line); renewed += line + '\n') {
    if (line.empty() || line.front() == '#') continue;
    const std::string input = line.substr(0, line.find(" =>"));
    std::string now = input + " => " + replaced(outcome(replaced(input, "␤", "\n")), "\n", "␤");
    now.erase(now.find_last_not_of(' ') + 1);
    EXPECT_TRUE(renew || now == line) << path << "; scripts/golden_errors.sh renews it\n  now: " << now << "\n  was: " << line;
    line = now;
    ++cases;
  }
  EXPECT_GT(cases, 0U) << path;
  if (renew) write_file(path, renewed);
}

}  // namespace mantissa::test
