#include "hf/export.h"

#include <iostream>
#include <memory>

#include "hf/gguf_export.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "tools/command.h"
#include "tools/report/read_progress.h"

namespace mantissa::tools {
namespace {

struct ExportArguments {
  std::string model, output, format = "hf", weights = "dequantized", dtype = "auto", device = "auto";
  std::optional<std::string> convention;
  std::vector<std::string> precision, precision_files;
  bool allow_different = false;
};

constexpr const char* kGgufFormat = "gguf";  // one file, so it is no format of folders

std::vector<std::string> export_formats() {
  std::vector<std::string> names = choice_names<ExportFormat>();
  names.emplace_back(kGgufFormat);
  return names;
}

// Says what was exported.
template <class Exported>
void print_exported(const std::string& output, const std::vector<std::string>& precision, const Exported& done) {
  std::cout << output << ": " << architecture_name(done.architecture) << (done.step ? text(" of step ", *done.step) : "")
            << precision_text(precision) << ", " << count_text(done.tensors, "tensor") << ", " << done.bytes
            << " bytes; read back and equal to " << (done.simulated ? "the weights, which forward rounds" : "what forward multiplies by")
            << '\n';
  if (!done.chat_template.empty()) std::cout << output << ": " << printable(done.chat_template) << '\n';
  for (const std::string& line : done.lines) std::cout << output << ": " << printable(line) << '\n';
}

ExitCode run_gguf_export(const ExportArguments& arguments) {
  require(!arguments.convention, ExitCode::usage, "--convention needs --format hf, got ", arguments.format, ": drop it");
  const GgufOptions options{.weights = choice_of<ExportWeights>(arguments.weights).value(),
                            .dtype = choice_of<ExportDtype>(arguments.dtype).value(),
                            .allow_different = arguments.allow_different};
  std::unique_ptr<Backend> device = device_of(arguments.device);
  const ExportedGguf done = with_read_progress(bytes_to_export(arguments.model), [&] {
    return export_gguf(arguments.model, arguments.output, options, std::move(device), arguments.precision);
  });
  const std::string file = printable(arguments.output);
  print_exported(file, arguments.precision, done);
  if (!done.has_tokenizer) std::cout << file << ": holds no tokenizer: " << kGgufWithoutTokenizer << '\n';
  if (done.decoded > 0)
    std::cout << file << ": " << count_text(done.decoded, "tensor")
              << " of codes that are not MXFP4, the only packed type that is written, " << (done.decoded == 1 ? "holds" : "hold")
              << " the values that they decode to\n";
  return ExitCode::ok;
}

ExitCode run_export(const ExportArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  if (arguments.format == kGgufFormat) return run_gguf_export(arguments);
  require(!arguments.output.ends_with(".gguf"), ExitCode::usage, "--output ", printable(arguments.output), ": --format ", arguments.format,
          " writes a folder, not a GGUF file: add --format gguf, or give another name");
  // The parser has refused all other names.
  ExportOptions options{.format = choice_of<ExportFormat>(arguments.format).value(),
                        .weights = choice_of<ExportWeights>(arguments.weights).value(),
                        .dtype = choice_of<ExportDtype>(arguments.dtype).value(),
                        .allow_different = arguments.allow_different};
  require(!options.allow_different || options.format == ExportFormat::mlx, ExitCode::usage,
          "--allow-different needs --format mlx or gguf, got ", arguments.format, ": drop it");
  if (arguments.convention) {
    require(options.format == ExportFormat::hf, ExitCode::usage, "--convention needs --format hf, got ", arguments.format, ": drop it");
    require(options.weights == ExportWeights::packed, ExitCode::usage,
            "--convention is of packed weights, and these are dequantized: drop it, or add --weights packed");
    options.convention = choice_of<Convention>(*arguments.convention).value();
  }
  std::unique_ptr<Backend> device = device_of(arguments.device);
  const ExportedModel done = with_read_progress(bytes_to_export(arguments.model, options, arguments.precision), [&] {
    return export_model(arguments.model, arguments.output, options, std::move(device), arguments.precision);
  });
  print_exported(printable(arguments.output), arguments.precision, done);
  return ExitCode::ok;
}

}  // namespace

Command export_command() {
  const auto arguments = std::make_shared<ExportArguments>();
  return {
      .name = "export",
      .summary = "write a model in Hugging Face's form, for MLX or as GGUF, with the weights that forward multiplies by",
      .example =
          "mantissa export runs/quickstart --output quickstart-hf\nmantissa export runs/mx --output mx-hf --weights packed\n"
          "mantissa export runs/mx --output mx-mlx --format mlx --weights packed",
      .options = {{"MODEL", &arguments->model,
                   "checkpoint folder; of a run or a folder of checkpoints, the one that `latest` names; a folder in Hugging "
                   "Face's form; or a GGUF file"},
                  {.name = "--output",
                   .target = &arguments->output,
                   .description = "a folder, or of the format gguf a file, that is not there yet",
                   .required = true},
                  {"--format", &arguments->format, "hf: for transformers and its servers; mlx: for mlx-lm; gguf: one file for llama.cpp",
                   export_formats()},
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
                   "with --format mlx or gguf, also export a model that mlx-lm or llama.cpp computes otherwise or cannot load; README.md, "
                   "or the key mantissa.differences, says how"},
                  precision_option(arguments->precision),
                  precision_file_option(arguments->precision_files),
                  device_option(arguments->device)},
      .run = [arguments] {
        add_precision_files(arguments->precision_files, arguments->precision);
        return run_export(*arguments);
      }};
}

}  // namespace mantissa::tools
