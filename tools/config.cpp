#include <iostream>
#include <memory>

#include "mantissa/train/load_config.h"
#include "tools/command.h"

namespace mantissa::tools {
namespace {

ExitCode print_schema() {
  RunConfig scratch;
  std::cout << config_schema(fields_of(scratch), "mantissa run configuration");
  return ExitCode::ok;
}

struct CheckArguments {
  ConfigSources sources;
  std::optional<int64_t> world;
};

ExitCode check(const CheckArguments& arguments) {
  const LoadedConfig loaded = load_run_config(arguments.sources, Inputs::must_exist, ranks_of(arguments.world));
  std::cout << effective_config(loaded.config, &loaded.report);
  return ExitCode::ok;
}

Command schema_command() {
  return {.name = "schema",
          .summary = "print the JSON schema of a run configuration",
          .example = "mantissa config schema > config.schema.json",
          .run = print_schema};
}

}  // namespace

Command config_command() {
  const auto arguments = std::make_shared<CheckArguments>();
  std::vector<Option> options = config_options(arguments->sources);
  options.push_back(world_option(arguments->world));
  const Command checked{.name = "check",
                        .summary = "check a configuration and print the effective one, each value with its origin",
                        .example = "mantissa config check configs/quickstart.json --set optimizer.lr=3e-4",
                        .options = options,
                        .run = [arguments] { return check(*arguments); }};
  return {.name = "config",
          .summary = "check a run configuration, or print its schema",
          .example = "mantissa config check configs/quickstart.json",
          .subcommands = {schema_command(), checked}};
}

}  // namespace mantissa::tools
