// The command line as data. A subcommand is one file, of its name, that returns a Command; only mantissa.cpp knows the parser (CLI11 costs
// ten seconds per translation unit) and only the tools print or exit. A new subcommand: its file, its declaration here, its line in the
// table of mantissa.cpp.
//
//   Command verify_command() {
//     struct Arguments { std::string path; bool deep = false; };
//     const auto arguments = std::make_shared<Arguments>();
//     return {.name = "verify", .summary = "check a checkpoint", .example = "mantissa verify runs/a/checkpoints/latest",
//             .options = {{"PATH", &arguments->path, "checkpoint"}, {"--deep", &arguments->deep, "read every chunk"}},
//             .run = [arguments] { return verify(arguments->path, arguments->deep); }};
//   }
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "hf/load_model.h"
#include "mantissa/base/error.h"
#include "mantissa/config/run_config.h"
#include "mantissa/json/config.h"
#include "mantissa/json/json.h"
#include "mantissa/tensor/tensor.h"
#include "mantissa/train/load_config.h"

namespace mantissa::tools {

// Target of a parsed value; it keeps the default that stands there. bool is a flag. A vector takes every occurrence, one value each; as a
// positional it takes all that follow. The pointer must stay valid until run() returns: point into an object that run() owns.
using OptionTarget = std::variant<bool*, int*, int64_t*, uint64_t*, double*, std::string*, std::optional<std::string>*,
                                  std::optional<int64_t>*, std::optional<uint64_t>*, std::optional<double>*, std::vector<std::string>*>;

struct Option {
  std::string name;  // "--steps", "-o,--out", or a positional in capitals: "CONFIG"
  OptionTarget target;
  std::string description;
  std::vector<std::string> choices = {};  // not empty: the only values accepted
  bool required = !name.starts_with('-');
};

struct Command {
  std::string name;
  std::string summary;  // one line, shown in the list of subcommands
  std::string example;  // one or more lines, shown by --help
  std::vector<Option> options = {};
  std::vector<Command> subcommands = {};  // with these, run stays empty and one of them must be given
  std::function<ExitCode()> run = {};     // may throw Error: the message goes to standard error and its code becomes the exit code
  bool runs_command = false;              // its first word that is not an option begins another command
  bool many_ranks = false;                // else a world above 1 in the environment is a mistake
};

// CONFIG, --set and --set-file, which every command that reads a run configuration takes, and its further options.
std::vector<Option> config_options(ConfigSources& sources, const std::vector<Option>& further);

// --world, for commands that look at a configuration without running it: how many ranks it is meant for. ranks_of() is 0 where it is not
// given, which stands for what the configuration implies; it throws Error(usage) for a number that is none.
Option world_option(std::optional<int64_t>& world, const char* condition = "");
int64_t ranks_of(const std::optional<int64_t>& world);

// Returns "1 rank"; "8 ranks: data 4 x tensor 2, experts over 2 data ranks". For use after load_run_config().
std::string layout_text(const ParallelConfig& parallel);

// Returns "120 steps"; "120 steps (2.5 epochs)" where they follow from training.epochs.
std::string length_text(int64_t steps, const std::optional<double>& epochs);

// Sets model.vocab_size, where it is null, to that of the tokenizer, for which `char` reads the training text. For use after
// load_run_config().
void set_vocabulary(RunConfig& config);

// --threads, for commands that read no run configuration. use_threads() throws Error(usage) for a number that is none.
Option threads_option(int& threads);
void use_threads(int threads);

// --dtype, for commands that compute with a saved model; dtype_of() is what load_model() takes.
Option dtype_option(std::optional<std::string>& dtype);
std::optional<Dtype> dtype_of(const std::optional<std::string>& dtype);

// --set, for commands that use a saved model with other values of its section "precision"; precision_text() names them in results, after
// a comma: ", precision.recipe=mxfp4_qat".
Option precision_option(std::vector<std::string>& precision);
// --set-file, for these commands: files with a section "precision". add_precision_files() puts their values before those of --set; it
// throws Error(usage) for files that hold something else.
Option precision_file_option(std::vector<std::string>& files);
void add_precision_files(const std::vector<std::string>& files, std::vector<std::string>& precision);
// Returns the values of a section "precision" in the object `file`, each as --set takes it. Throws Error(usage) for another object.
std::vector<std::string> precision_values(const Json& file, const std::string& name);
std::string precision_text(const std::vector<std::string>& precision);

// --device, for commands that compute and read no run configuration. device_of() makes the device; it throws Error(environment) for one
// that this build lacks.
Option device_option(std::string& device);
DeviceChoice device_choice(const std::string& device);
std::unique_ptr<Backend> device_of(const std::string& device);

// Parses token ids, "1,2,3" or "1 2 3", for models whose tokenizer is not here. Throws Error(usage) that names the option and the text that
// is no id below vocab_size.
std::vector<int32_t> parse_token_ids(const std::string& option, const std::string& ids, int64_t vocab_size);

// Reads an amount as people write it, "4e12", "4T", "3.2G", "64Gi": a positive number with at most one unit behind it, k, M, G, T, P, E for
// powers of 1000, Ki, Mi, Gi, Ti, Pi, Ei for powers of 1024. Throws Error(usage) that names the option for anything else, and for more than
// 1e30.
double quantity(const std::string& option, const std::string& word);

Command train_command();
Command eval_command();
Command generate_command();
Command tokenize_command();
Command export_command();
Command inspect_command();
Command verify_command();
Command bench_command();
Command conformance_command();
Command doctor_command();
Command explain_command();
Command analyze_command();
Command report_command();
Command trace_command();
Command compare_command();
Command config_command();
Command launch_command(std::vector<std::string> subcommands);  // subcommands that it runs by this binary

}  // namespace mantissa::tools
