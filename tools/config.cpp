#include <iostream>
#include <memory>

#include "mantissa/train/load_config.h"
#include "tools/command.h"

namespace mantissa::tools {

Command config_command() {
  struct Arguments {
    ConfigSources sources;
    std::optional<int64_t> world;
  };
  const auto arguments = std::make_shared<Arguments>();
  const auto check = [arguments] {
    const LoadedConfig loaded = load_run_config(arguments->sources, Inputs::must_exist, ranks_of(arguments->world));
    std::cout << effective_config(loaded.config, &loaded.report);
    return ExitCode::ok;
  };
  const auto print_schema = [] {
    RunConfig scratch;
    std::cout << config_schema(fields_of(scratch), "mantissa run configuration");
    return ExitCode::ok;
  };
  return {.name = "config",
          .summary = "check a run configuration, or print its schema",
          .example = "mantissa config check configs/quickstart.json",
          .subcommands = {{.name = "schema",
                           .summary = "print the JSON schema of a run configuration",
                           .example = "mantissa config schema > config.schema.json",
                           .run = print_schema},
                          {.name = "check",
                           .summary = "check a configuration and print the effective one, each value with its origin",
                           .example = "mantissa config check configs/quickstart.json --set optimizer.lr=3e-4",
                           .options = config_options(arguments->sources, {world_option(arguments->world)}),
                           .run = check}}};
}

}  // namespace mantissa::tools
