// The table of subcommands and the only file that knows CLI11: it turns Commands into a parser, runs the chosen one and maps every failure
// to an exit code.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <iostream>
#include <limits>
#include <new>
#include <sstream>
#include <type_traits>

#include "base/file.h"
#include "base/limits.h"
#include "base/parallel.h"
#include "job/launch.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "mantissa/base/version.h"
#include "mantissa/comm/transport.h"
#include "tools/command.h"

namespace mantissa::tools {
namespace {

std::vector<std::string> names_of(const std::vector<Command>& commands) {
  std::vector<std::string> names;
  for (const Command& command : commands) names.push_back(command.name);
  return names;
}

std::vector<Command> all_commands() {
  std::vector<Command> all = {train_command(),   eval_command(),        generate_command(), tokenize_command(),
                              export_command(),  inspect_command(),     verify_command(),   analyze_command(),
                              explain_command(), report_command(),      trace_command(),    compare_command(),
                              bench_command(),   conformance_command(), doctor_command(),   config_command()};
  all.push_back(launch_command(names_of(all)));
  return all;
}

std::string replace_line_ends(const std::string& lines, const char* with) {
  std::string out;
  for (const char c : lines) out += c == '\n' ? with : std::string(1, c);
  return out;
}

template <class T>
struct IntegerType : std::type_identity<T> {};
template <class T>
struct IntegerType<std::optional<T>> : std::type_identity<T> {};
template <class T>
constexpr bool kIsInteger = std::is_integral_v<typename IntegerType<T>::type> && !std::is_same_v<T, bool>;

// CLI11 reads integers as C does: it cuts those beyond 64 bits, wraps negative ones and takes a leading zero for octal.
template <class T>
CLI::Option* add_integer(CLI::App& app, const Option& option, T* target) {
  using Integer = typename IntegerType<T>::type;
  const std::string shown = option.name.substr(0, option.name.find(','));
  const std::function<void(const std::string&)> read = [shown, target](const std::string& word) {
    Integer number = 0;
    const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), number);
    require(problem == std::errc{} && end == word.data() + word.size(), ExitCode::usage, shown, ": must be a whole number from ",
            std::numeric_limits<Integer>::min(), " to ", std::numeric_limits<Integer>::max(), ", got '", word, "'");
    *target = number;
  };
  CLI::Option* const added = app.add_option_function(option.name, read, option.description);
  if constexpr (std::is_same_v<T, Integer>) added->default_str(text(*target));
  return added->type_name(std::is_signed_v<Integer> ? "INT" : "UINT");
}

template <class T>
CLI::Option* add_target(CLI::App& app, const Option& option, T* target) {
  if constexpr (kIsInteger<T>) {
    return add_integer(app, option, target);
  } else if constexpr (std::is_same_v<T, bool>) {
    return app.add_flag(option.name, *target, option.description);
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    CLI::Option* const added = app.add_option(option.name, *target, option.description);
    const bool positional = option.name.front() != '-';
    return positional ? added : added->expected(1)->take_all()->allow_extra_args(false);  // one value each: a file after it stays a file
  } else {
    CLI::Option* const added = app.add_option(option.name, *target, option.description);
    if constexpr (std::is_arithmetic_v<T>) added->capture_default_str();
    if constexpr (std::is_same_v<T, std::string>) {
      if (!target->empty()) added->default_str(replace_line_ends(*target, "\\n"));
    }
    return added;
  }
}

void add_command(CLI::App& app, const Command& command, const Command*& chosen) {
  CLI::App* const sub = app.add_subcommand(command.name, command.summary);
  sub->footer("\nExample:\n  " + replace_line_ends(command.example, "\n  "));
  for (const Option& option : command.options) {
    CLI::Option* const added = std::visit([&](auto* target) { return add_target(*sub, option, target); }, option.target);
    added->required(option.required);
    if (!option.choices.empty()) added->check(CLI::IsMember(option.choices));
  }
  if (command.subcommands.empty()) {
    sub->callback([&command, &chosen] { chosen = &command; });
    return;
  }
  for (const Command& nested : command.subcommands) add_command(*sub, nested, chosen);
  sub->require_subcommand(1);
}

// CLI11 calls an unknown subcommand an unexpected argument and suggests nothing.
void check_names(const std::vector<Command>& commands, const std::vector<std::string>& words, const std::string& before) {
  if (words.empty() || words.front().starts_with('-') || commands.empty()) return;
  const auto found = std::find_if(commands.begin(), commands.end(), [&](const Command& command) { return command.name == words.front(); });
  if (found == commands.end()) {
    const std::vector<std::string> names = names_of(commands);
    fail(ExitCode::usage, before, ": no subcommand '", words.front(), "'", did_you_mean(words.front(), names),
         "\nsubcommands: ", joined(names, " "));
  }
  check_names(found->subcommands, {words.begin() + 1, words.end()}, before + " " + found->name);
}

// CLI11 takes the next word for the value of `--output=`.
void check_values(const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (word == "--") return;
    require(!word.starts_with("--") || word.find('=') != word.size() - 1, ExitCode::usage, word, ": there is no value after the =");
  }
}

// Puts a "--" before the command that `launch` runs, so that the options behind it are left to that.
void set_command_apart(const Command& command, std::vector<std::string>& words) {
  size_t next = 1;
  while (next < words.size() && words[next].starts_with('-')) {
    if (words[next] == "--") return;
    const auto takes_next = [&](const Option& option) {  // not where a value follows a =
      return std::ranges::count(split(option.name, ','), words[next]) > 0 && !std::holds_alternative<bool*>(option.target);
    };
    next += std::ranges::any_of(command.options, takes_next) ? 2U : 1U;
  }
  if (next < words.size()) words.insert(words.begin() + static_cast<std::ptrdiff_t>(next), "--");
}

// Describes the first word that is not an option of any command, with the nearest option; "" if there is none.
std::string unknown_option(const std::vector<Command>& commands, const std::vector<std::string>& words) {
  std::vector<std::string> known = {"--help"};
  const std::vector<Command>* level = &commands;
  for (const std::string& word : words) {
    if (word == "--") break;
    const std::string name = word.substr(0, word.find('='));
    const auto command = std::find_if(level->begin(), level->end(), [&](const Command& each) { return each.name == word; });
    if (command != level->end()) {
      for (const Option& option : command->options) {
        for (const std::string& each : split(option.name, ',')) known.push_back(each);
      }
      level = &command->subcommands;
    } else if (name.starts_with("--") && std::find(known.begin(), known.end(), name) == known.end()) {
      if (level == &commands) known.emplace_back("--version");
      return text("no option '", name, "'", did_you_mean(name, known), "\nRun with --help for more information.");
    }
  }
  return "";
}

// Does not use std::cerr: a reader that does not read would keep a rank that failed from leaving.
void print_error(const char* kind, const std::string& message) {
  UnblockedOutput(STDERR_FILENO).write(text(kind, "error: ", printable(message, "\n  "), '\n'));
}

// Opens closed standard streams: else the first files that are opened become these, and what is printed goes into them.
void occupy_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    const bool open = ::fcntl(stream, F_GETFD) >= 0 || ::open("/dev/null", O_RDWR) == stream;
    require(open, ExitCode::environment, "/dev/null cannot take the place of closed standard streams: ", system_message(errno));
  }
}

ExitCode run(int argc, char** argv) {
  const std::vector<Command> commands = all_commands();
  std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && words.front() == "help") {  // "help train" asks for "train --help"
    words.erase(words.begin());
    words.emplace_back("--help");
  }
  check_names(commands, words, "mantissa");
  for (const Command& command : commands) {
    if (command.runs_command && !words.empty() && words.front() == command.name) set_command_apart(command, words);
  }
  check_values(words);
  CLI::App app{"mantissa: trains language models", "mantissa"};
  app.footer("\nmantissa SUBCOMMAND --help shows its options and an example.");
  app.set_version_flag("-V,--version", version_text());
  app.require_subcommand(1);
  const Command* chosen = nullptr;
  for (const Command& command : commands) add_command(app, command, chosen);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& error) {
    std::ostringstream problem;
    const int code = app.exit(error, std::cout, problem);
    if (code == 0) return ExitCode::ok;
    const std::string unknown = unknown_option(commands, words), message = problem.str();
    print_error("", unknown.empty() ? message.substr(0, message.find_last_not_of('\n') + 1) : unknown);
    return ExitCode::usage;
  }
  if (!chosen->many_ranks) {
    const Launch launch = launch_from_environment();
    require(launch.world == 1, ExitCode::usage, "mantissa ", chosen->name, " runs as one process, and this is ", describe(launch));
  }
  return chosen->run();
}

}  // namespace

}  // namespace mantissa::tools

int main(int argc, char** argv) {
  static const mantissa::AlternateStack handlers;  // the main thread multiplies, too
  mantissa::restore_hangup();
  std::signal(SIGPIPE, SIG_DFL);  // a reader that goes away ends a command, and train alone goes on (signals.h)
  std::signal(SIGXFSZ, SIG_IGN);  // beyond a limit on file sizes writes fail
  try {
    mantissa::tools::occupy_standard_streams();
    const mantissa::ExitCode code = mantissa::tools::run(argc, argv);
    // Training goes on without its output and has cleared the error by now; whatever else prints has failed without it.
    const bool written = std::cout.flush().good() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
    mantissa::require(written, mantissa::ExitCode::storage, "standard output: write failed");
    return static_cast<int>(code);
  } catch (const mantissa::Error& error) {
    mantissa::tools::print_error("", error.what());
    return static_cast<int>(error.code());
  } catch (const std::filesystem::filesystem_error& error) {
    mantissa::tools::print_error("", error.what());
    return static_cast<int>(mantissa::path_failure(error.code().value()));
  } catch (const std::bad_alloc&) {
    mantissa::tools::print_error("", "out of memory" + mantissa::memory_limits());
    return static_cast<int>(mantissa::ExitCode::environment);
  } catch (const std::exception& error) {
    mantissa::tools::print_error("internal ", error.what());
  }
  return static_cast<int>(mantissa::ExitCode::internal);
}
