#include <iostream>
#include <memory>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_search.h"
#include "checkpoint/saved_model.h"
#include "hf/export.h"
#include "hf/gguf_export.h"
#include "hf/gguf_reader.h"
#include "hf/hf_weights.h"
#include "hf/mlx.h"
#include "hf/tile_scales.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "tools/command.h"
#include "tools/report/read_progress.h"

namespace mantissa::tools {
namespace {

struct VerifyArguments {
  std::string path, device = "auto";
  std::optional<std::string> against;
  std::vector<std::string> precision, precision_files;
};

// Throws Error(data) for an exported folder that has lost a part: it is damaged, not another kind of folder.
void require_whole(const std::filesystem::path& folder) {
  const auto lacks = [&](const char* name) {
    std::error_code error;
    return !std::filesystem::exists(folder / name, error);
  };
  require(!lacks("config.json"), ExitCode::data, folder.string(), ": lacks config.json");
  require(!lacks("model.safetensors") || !lacks("model.safetensors.index.json"), ExitCode::data, folder.string(),
          ": lacks model.safetensors");
}

void warn_of_servers(const HfWeights& folder) {
  for (const std::string& finding : folder.ignore_list_findings()) log_warning(finding);
  if (const std::optional<std::string> rounding = folder.vllm_rounding()) log_warning(*rounding);
  if (const std::optional<std::string> inverted = folder.inverted_scales()) log_warning(*inverted);
}

void print_lines(const std::string& path, const std::vector<std::string>& lines) {
  for (const std::string& line : lines) std::cout << printable(path) << ": " << printable(line) << '\n';
}

// Repeats what the export was allowed to have otherwise.
void print_allowed(const std::string& path, const char* program, const std::vector<std::string>& differences) {
  for (const std::string& one : differences)
    std::cout << printable(path) << ": " << program << " computes it otherwise than forward, or cannot load it: " << printable(one) << '\n';
}

void report_tiles(HfWeights& folder) {
  const TileFit fit = fit_of_tiles(folder);
  if (fit.tiles == 0) return;
  if (fit.lossy == 0) {
    std::cout << count_text(fit.tiles, "tile") << " of 128x128 in MXFP4: all are E4M3 without loss\n";
  } else {
    std::cout << fit.lossy << " of " << count_text(fit.tiles, "tile") << " of 128x128 in MXFP4 lose an element as E4M3, the first of "
              << printable(fit.first) << '\n';
  }
}

// Throws Error(data) for a folder that does not match its own mantissa.json.
void require_undamaged(const std::filesystem::path& folder) {
  std::error_code error;
  if (std::filesystem::exists(folder / kProofFile, error)) verify_export(folder);
}

constexpr const char* kOtherFormats = "if it was exported with precision.* of --set or --set-file, give verify the same\n";

// Says whether values that are equal are so by equal codes and scales.
void report_codes(const std::string& path, HfWeights& folder, ForwardWeights& weights) {
  const auto [tensors, difference] = compare_codes(folder, weights);
  if (tensors == 0) return;
  std::cout << printable(path) << ": codes and scales of " << count_text(tensors, "tensor") << " are ";
  if (!difference) {
    std::cout << "those of forward, bit for bit\n";
  } else {
    std::cout << "not all those of forward, although the values are; the first that differs is " << printable(*difference) << '\n';
    require_undamaged(path);
  }
}

ExitCode compare_folder(const VerifyArguments& arguments, ModelExport& against) {
  HfWeights folder(arguments.path);
  print_allowed(arguments.path, "mlx-lm", export_deviations(folder));
  ForwardWeights& weights = against.weights();
  const std::string where = printable(weights.where());
  const auto differs = [&](const char* how, const auto& list) {
    if (list.empty()) return false;
    std::cout << printable(arguments.path) << ' ' << how << ' ' << where << ":\n";
    for (const auto& difference : list) std::cout << "  " << printable(text(difference)) << '\n';
    return true;
  };
  if (differs("has another model than", forward_differences(against.model(), folder.config().model))) return ExitCode::difference;
  if (differs("has codes that a server multiplies differently than", export_scheme_differences(folder, weights)))
    return ExitCode::difference;
  const std::optional<std::string> difference =
      with_read_progress(bytes_to_compare(arguments.path, *arguments.against), [&] { return export_difference(folder, weights); });
  const std::optional<std::string> first = difference ? difference : against.tokenizer_difference(folder);
  if (first) {
    std::cout << printable(arguments.path) << ": " << printable(*first) << " (" << where << ")\n";
    if (difference && arguments.precision.empty()) std::cout << kOtherFormats;
    return ExitCode::difference;
  }
  const std::string simulated = against.simulated_weights();
  std::cout << printable(arguments.path) << ": 0 values differ in " << count_text(folder.tensors().size(), "tensor") << " from "
            << (simulated.empty() ? "what forward multiplies by" : "the weights") << " in " << where << precision_text(arguments.precision)
            << '\n';
  if (!simulated.empty()) log_warning(where + ": " + simulated);
  report_codes(arguments.path, folder, weights);
  print_lines(arguments.path, server_lines(folder, weights));
  report_tiles(folder);
  warn_of_servers(folder);
  return ExitCode::ok;
}

// A folder in which something differs, or cannot be read, may be damaged: that has the same exit code with and without --against. An error
// of the other side is told at once: to read the folder may take minutes.
ExitCode verify_folder_against(const VerifyArguments& arguments, std::unique_ptr<Backend> device) {
  ModelExport against(*arguments.against, {}, std::move(device), arguments.precision);
  ExitCode verdict = ExitCode::ok;
  try {
    verdict = compare_folder(arguments, against);
  } catch (const CheckpointDamage&) {
    throw;
  } catch (const Error&) {
    require_undamaged(arguments.path);
    throw;
  }
  if (verdict == ExitCode::difference) require_undamaged(arguments.path);
  return verdict;
}

ExitCode verify_folder(const VerifyArguments& arguments, std::unique_ptr<Backend> device) {
  require_whole(arguments.path);
  if (arguments.against) return verify_folder_against(arguments, std::move(device));
  const int64_t tensors = with_read_progress(bytes_of_folder(arguments.path), [&] { return verify_export(arguments.path); });
  std::cout << printable(arguments.path) << ": intact: " << count_text(tensors, "tensor") << " as exported\n";
  HfWeights folder(arguments.path);
  print_allowed(arguments.path, "mlx-lm", export_deviations(folder));
  if (folder.format() == ExportFormat::mlx)
    if (const std::string need = mlx_inputs_need(folder); !need.empty()) print_lines(arguments.path, {need});
  report_tiles(folder);
  warn_of_servers(folder);
  return ExitCode::ok;
}

ExitCode compare_gguf(const VerifyArguments& arguments, std::unique_ptr<Backend> device) {
  ExportSource source(*arguments.against, std::move(device), arguments.precision);
  GgufFile file(arguments.path);
  print_allowed(arguments.path, "llama.cpp", gguf_allowed_differences(file));
  const std::string where = printable(source.weights->where()), path = printable(arguments.path);
  const std::optional<std::string> difference =
      with_read_progress(bytes_to_compare(arguments.path, *arguments.against), [&] { return gguf_difference(file, source); });
  if (difference) {
    std::cout << path << ": " << printable(*difference) << " (" << where << ")\n";
    return ExitCode::difference;
  }
  const std::string rounded = simulated_weights(source.model->plan);
  std::cout << path << ": 0 values differ in " << count_text(file.header().tensors().size(), "tensor") << " from "
            << (rounded.empty() ? "what forward multiplies by" : "the weights") << " in " << where << precision_text(arguments.precision)
            << '\n';
  if (const int64_t tensors = gguf_tensors_of_codes(file, source); tensors > 0)
    std::cout << path << ": codes and scales of " << count_text(tensors, "tensor") << " are those of forward, bit for bit\n";
  print_lines(arguments.path, gguf_roundings(file, source));
  if (!rounded.empty()) log_warning(where + ": " + rounded);
  const std::optional<std::string> left_out = gguf_tokenizer_left_out(file, source);
  if (!left_out) return ExitCode::ok;
  std::cout << path << ": " << *left_out << " (" << where << ")\n";
  return ExitCode::difference;  // the tokenizer
}

// Files of other programs have no hashes, and are compared as folders are: they may have other types and keys than an export has.
ExitCode verify_other_gguf(const VerifyArguments& arguments, std::unique_ptr<Backend> device) {
  if (arguments.against) {
    const ExitCode verdict = verify_folder_against(arguments, std::move(device));
    if (verdict != ExitCode::ok) return verdict;
    const ExportSource source(*arguments.against, device_of(arguments.device), arguments.precision);
    print_lines(arguments.path, gguf_roundings(GgufFile(arguments.path), source));
    return verdict;
  }
  const int64_t tensors = with_read_progress(bytes_of_folder(arguments.path), [&] { return read_all_of_gguf(arguments.path); });
  std::cout << printable(arguments.path) << ": " << count_text(tensors, "tensor")
            << " of its model, all values finite; there are no hashes to compare\n";
  return ExitCode::ok;
}

// A file that differs may be damaged, which its hashes tell, if it has them still.
ExitCode verify_gguf_file(const VerifyArguments& arguments, std::unique_ptr<Backend> device) {
  const bool exported = GgufFile(arguments.path).header().find(gguf::kVersionOfWriter) != nullptr;
  if (!exported) return verify_other_gguf(arguments, std::move(device));
  if (!arguments.against) {
    const int64_t tensors = verify_gguf(arguments.path);
    std::cout << printable(arguments.path) << ": intact: " << count_text(tensors, "tensor") << " as exported\n";
    print_allowed(arguments.path, "llama.cpp", gguf_allowed_differences(GgufFile(arguments.path)));
    return ExitCode::ok;
  }
  const ExitCode verdict = compare_gguf(arguments, std::move(device));
  if (verdict == ExitCode::difference && has_gguf_hashes(arguments.path)) verify_gguf(arguments.path);
  return verdict;
}

ExitCode verify_checkpoint(const std::string& path, Backend& device) {
  CheckpointReader reader = open_checkpoint(path);
  const int64_t quantized = with_read_progress(bytes_to_verify(reader), [&] {
    reader.verify();
    return verify_codes(reader, device);
  });
  const Manifest& manifest = reader.manifest();
  std::cout << printable(reader.directory().string()) << ": intact: step " << manifest.step << ", " << manifest.tensors.size()
            << " tensors, " << reader.bytes() << " bytes in " << count_text(manifest.shards.size(), "shard");
  if (quantized > 0) std::cout << "; the codes of " << count_text(quantized, "weight") << " follow from their masters";
  std::cout << '\n';
  return ExitCode::ok;
}

ExitCode verify(const VerifyArguments& arguments) {
  require(arguments.precision.empty() || arguments.against, ExitCode::usage, "--set: says how --against is quantized: give that, too");
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  std::unique_ptr<Backend> device = device_of(arguments.device);
  std::error_code error;
  const bool exported = std::filesystem::exists(std::filesystem::path(arguments.path) / kProofFile, error);
  if (is_gguf_file(arguments.path)) return verify_gguf_file(arguments, std::move(device));
  if (exported || is_published_model(arguments.path)) return verify_folder(arguments, std::move(device));
  require(!arguments.against || std::filesystem::exists(arguments.path, error), ExitCode::usage, arguments.path,
          ": there is no such file or folder");
  require(!arguments.against, ExitCode::usage, "--against compares an export with a checkpoint, but ", arguments.path, " is not an export");
  return verify_checkpoint(arguments.path, *device);
}

}  // namespace

Command verify_command() {
  const auto arguments = std::make_shared<VerifyArguments>();
  return {
      .name = "verify",
      .summary = "read and hash every byte of a checkpoint, and make its codes again, or of an export; damage is exit code 4",
      .example = "mantissa verify runs/quickstart/checkpoints/step-00000700\nmantissa verify quickstart-hf --against runs/quickstart",
      .options = {{"PATH", &arguments->path,
                   "checkpoint folder; of a run or a folder of checkpoints, the one that `latest` names; an export; or a GGUF file"},
                  {"--against", &arguments->against,
                   "checkpoint or folder whose forward weights the export PATH must hold, bit for bit, codes with inputs quantized alike; "
                   "else exit code 1, or 4 if the export is damaged"},
                  precision_option(arguments->precision),
                  precision_file_option(arguments->precision_files),
                  device_option(arguments->device)},
      .run = [arguments] {
        add_precision_files(arguments->precision_files, arguments->precision);
        return verify(*arguments);
      }};
}

}  // namespace mantissa::tools
