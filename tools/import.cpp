#include "mantissa/hf/import.h"

#include <iostream>
#include <memory>

#include "mantissa/base/log.h"
#include "mantissa/base/printable.h"
#include "tools/command.h"
#include "tools/report/read_progress.h"

namespace mantissa::tools {
namespace {

struct ImportArguments {
  std::string folder, output;
};

ExitCode run_import(const ImportArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  const ImportedModel imported =
      with_read_progress(bytes_to_import(arguments.folder), [&] { return import_model(arguments.folder, arguments.output); });
  std::cout << printable(arguments.output) << ": " << architecture_name(imported.architecture) << ", " << imported.parameters
            << " parameters, " << imported.bytes << " bytes\n";
  return ExitCode::ok;
}

}  // namespace

Command import_command() {
  const auto arguments = std::make_shared<ImportArguments>();
  return {.name = "import",
          .summary = "make a checkpoint of a model in Hugging Face's form",
          .example = "mantissa import quickstart-hf --output imported\nmantissa eval imported --prompt-ids 1,2,3",
          .options = {{.name = "FOLDER",
                       .target = &arguments->folder,
                       .description = "with config.json and model.safetensors, or its shards and their index",
                       .required = true},
                      {.name = "--output",
                       .target = &arguments->output,
                       .description = "the checkpoint, a folder that is not there yet: for checkpoint.init_from, eval, generate and export",
                       .required = true}},
          .run = [arguments] { return run_import(*arguments); }};
}

}  // namespace mantissa::tools
