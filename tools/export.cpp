#include "hf/export.h"

#include <iostream>
#include <memory>

#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "tools/command.h"
#include "tools/report/read_progress.h"

namespace mantissa::tools {
namespace {

struct ExportArguments {
  std::string model, output, format = "hf", weights = "dequantized", dtype = "auto", device = "auto";
  std::optional<std::string> convention;
  bool allow_different = false;
};

ExitCode run_export(const ExportArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  // The parser has refused all other names.
  ExportOptions options{.format = choice_of<ExportFormat>(arguments.format).value(),
                        .weights = choice_of<ExportWeights>(arguments.weights).value(),
                        .dtype = choice_of<ExportDtype>(arguments.dtype).value(),
                        .allow_different = arguments.allow_different};
  require(!options.allow_different || options.format == ExportFormat::mlx, ExitCode::usage, "--allow-different needs --format mlx, got ",
          arguments.format, ": drop it");
  if (arguments.convention) {
    require(options.format == ExportFormat::hf, ExitCode::usage, "--convention needs --format hf, got ", arguments.format, ": drop it");
    require(options.weights == ExportWeights::packed, ExitCode::usage,
            "--convention is of packed weights, and these are dequantized: drop it, or add --weights packed");
    options.convention = choice_of<Convention>(*arguments.convention).value();
  }
  std::unique_ptr<Backend> device = device_of(arguments.device);
  const ExportedModel done = with_read_progress(bytes_to_export(arguments.model, options), [&] {
    return export_model(arguments.model, arguments.output, options, std::move(device));
  });
  const std::string folder = printable(arguments.output);
  std::cout << folder << ": " << architecture_name(done.architecture) << (done.step ? text(" of step ", *done.step) : "") << ", "
            << count_text(done.tensors, "tensor") << ", " << done.bytes << " bytes; read back and equal to "
            << (done.simulated ? "the weights, which forward rounds" : "what forward multiplies by") << '\n';
  if (!done.chat_template.empty()) std::cout << folder << ": " << printable(done.chat_template) << '\n';
  return ExitCode::ok;
}

}  // namespace

Command export_command() {
  const auto arguments = std::make_shared<ExportArguments>();
  return {
      .name = "export",
      .summary = "write a model in Hugging Face's form or for MLX, with the weights that forward multiplies by",
      .example =
          "mantissa export runs/quickstart --output quickstart-hf\nmantissa export runs/mx --output mx-hf --weights packed\n"
          "mantissa export runs/mx --output mx-mlx --format mlx --weights packed",
      .options = {{"MODEL", &arguments->model,
                   "checkpoint folder; of a run or a folder of checkpoints, the one that `latest` names; or a folder in "
                   "Hugging Face's form"},
                  {.name = "--output", .target = &arguments->output, .description = "a folder that is not there yet", .required = true},
                  {"--format", &arguments->format, "hf: for transformers and its servers; mlx: for mlx-lm", choice_names<ExportFormat>()},
                  {"--weights", &arguments->weights, "dequantized: values; packed: codes and scales of what the plan quantizes",
                   choice_names<ExportWeights>()},
                  {"--convention", &arguments->convention,
                   "of packed weights in the format hf: how a server expects them; compressed-tensors unless given",
                   choice_names<Convention>()},
                  {"--dtype", &arguments->dtype,
                   "of the weights; auto: the narrowest that holds each tensor exactly, for one that was never trained "
                   "that of its file",
                   choice_names<ExportDtype>()},
                  {"--allow-different", &arguments->allow_different,
                   "with --format mlx, also export a model that mlx-lm computes otherwise or cannot load; README.md says how"},
                  device_option(arguments->device)},
      .run = [arguments] { return run_export(*arguments); }};
}

}  // namespace mantissa::tools
