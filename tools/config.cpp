#include "mantissa/train/config.h"

#include <iostream>
#include <memory>

#include "command.h"

namespace mantissa::tools {
namespace {

ExitCode print_schema() {
  RunConfig scratch;
  std::cout << config_schema(fields_of(scratch), "mantissa run configuration");
  return ExitCode::ok;
}

ExitCode check(const ConfigSources& sources) {
  const LoadedConfig loaded = load_run_config(sources);
  std::cout << effective_config(loaded.config, &loaded.report);
  return ExitCode::ok;
}

}  // namespace

Command config_command() {
  const auto sources = std::make_shared<ConfigSources>();
  const Command schema{.name = "schema",
                       .summary = "print the JSON schema of a run configuration",
                       .example = "mantissa config schema > configs/config.schema.json",
                       .run = print_schema};
  const Command checked{.name = "check",
                        .summary = "check a configuration and print the effective one, each value with its origin",
                        .example = "mantissa config check configs/quickstart.json --set optimizer.lr=3e-4",
                        .options = config_options(*sources),
                        .run = [sources] { return check(*sources); }};
  return {.name = "config",
          .summary = "check a run configuration, or print its schema",
          .example = "mantissa config check configs/quickstart.json",
          .subcommands = {schema, checked}};
}

}  // namespace mantissa::tools
