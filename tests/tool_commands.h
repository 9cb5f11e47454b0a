// Commands of the program, run in the process of a test: what they say of wrong input needs no start of the program, which takes longer.
#pragma once

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <string>
#include <vector>

#include "error_messages.h"
#include "tools/command.h"

namespace mantissa::test {

// Gives an option its word, as the parser does with one that is right.
inline void give(const tools::Option& option, const std::string& word) {
  std::visit(
      [&word]<class T>(T* target) {
        if constexpr (std::is_same_v<T, bool>) {
          *target = true;
        } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
          target->push_back(word);
        } else if constexpr (std::is_convertible_v<std::string, T>) {
          *target = word;
        } else if constexpr (std::is_arithmetic_v<T>) {
          *target = static_cast<T>(std::stod(word));
        } else {
          *target = static_cast<typename T::value_type>(std::stod(word));
        }
      },
      option.target);
}

inline tools::Command command_of(const std::string& name) {
  for (tools::Command command :
       {tools::eval_command(), tools::generate_command(), tools::tokenize_command(), tools::export_command(), tools::inspect_command(),
        tools::verify_command(), tools::bench_command(), tools::conformance_command(), tools::report_command(), tools::compare_command(),
        tools::analyze_command(), tools::trace_command(), tools::config_command(), tools::launch_command({})})
    if (command.name == name) return command;
  fail(ExitCode::internal, "no command ", name);
}

// The words of a line, which may be in quotation marks.
inline std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  std::istringstream in(line);
  for (std::string word; in >> std::quoted(word);) words.push_back(word);
  return words;
}

// The option that is called as the word; for any other word the positional at which it stands.
inline tools::Option option_of(const tools::Command& command, const std::string& word, size_t positionals) {
  for (const tools::Option& option : command.options) {
    const bool list = std::holds_alternative<std::vector<std::string>*>(option.target);
    if (word.starts_with("--") ? option.name.substr(0, option.name.find(',')) == word
                               : option.name.front() != '-' && (list || positionals-- == 0))
      return option;
  }
  fail(ExitCode::internal, command.name, " has no option ", word);
}

// Runs a command with options whose values are words of their own.
inline ExitCode run_command(const std::vector<std::string>& words) {
  tools::Command command = command_of(words.at(0));
  size_t at = 1, positionals = 0;
  for (; !command.subcommands.empty(); ++at) {
    const std::vector<tools::Command> nested = command.subcommands;
    command = *std::ranges::find(nested, words.at(at), &tools::Command::name);
  }
  for (; at < words.size(); ++at) {
    const bool named = words[at].starts_with("--");
    const tools::Option option = option_of(command, words[at], named ? 0 : positionals++);
    give(option, named && !std::holds_alternative<bool*>(option.target) ? words.at(++at) : words[at]);
  }
  return command.run();
}

struct CommandResult {
  int exit_code = 0;
  std::string output, error;  // standard output; the message of an error
};

inline CommandResult command_result(const std::vector<std::string>& words) {
  ::testing::internal::CaptureStdout();
  ExitCode code = ExitCode::ok;
  const std::string outcome = outcome_of([&] { code = run_command(words); });
  const std::string output = ::testing::internal::GetCapturedStdout();
  if (outcome == "0") return {static_cast<int>(code), output, ""};
  return {std::stoi(outcome), output, outcome.substr(outcome.find(' ') + 1)};
}

// The working directory until the end of the block.
class WorkingFolder {
 public:
  explicit WorkingFolder(const std::filesystem::path& folder) { std::filesystem::current_path(folder); }
  ~WorkingFolder() { std::filesystem::current_path(before_); }
  WorkingFolder(const WorkingFolder&) = delete;
  WorkingFolder& operator=(const WorkingFolder&) = delete;

 private:
  std::filesystem::path before_ = std::filesystem::current_path();
};

}  // namespace mantissa::test
