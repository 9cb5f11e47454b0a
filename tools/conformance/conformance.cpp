// Golden vectors against a backend: the bits of the codecs, and GEMMs of quantized operands.
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>

#include "base/file.h"
#include "json/json_fields.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "tools/command.h"
#include "tools/conformance/golden_check.h"

namespace mantissa::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char *kManifest = "manifest.json", *kExamples = "worked_examples.json";
constexpr int64_t kLargestFile = int64_t{1} << 30;

std::string content_of(const fs::path& path) { return File::open_input(path).content(kLargestFile); }

// Describes a file in the words of the manifest.
Json description(const GoldenFile& file, size_t bytes) {
  if (const auto* const gemm = std::get_if<GoldenGemm>(&file)) {
    return {{"a", format_name(gemm->a_format)},
            {"b", format_name(gemm->b_format)},
            {"M", gemm->m},
            {"N", gemm->n},
            {"K", gemm->k},
            {"bytes", bytes}};
  }
  const auto& matrix = std::get<GoldenQuantization>(file);
  const Quantization& how = matrix.how;
  return {{"fmt", format_name(how.format)},
          {"mode", scale_rule_name(how.rule)},
          {"input", matrix.input_dtype == Dtype::bf16 ? "bf16" : "f32"},
          {"blocks", how.tiles()     ? "32x32 tiles"
                     : how.rowwise() ? "1x32 rowwise"
                                     : "32x1 columnwise"},
          {"rows", matrix.rows},
          {"cols", matrix.columns},
          {"dequant", !matrix.dequantized.empty()},
          {"swizzled", !matrix.swizzled.empty()},
          {"nonfinite", matrix.nonfinite},
          {"bytes", bytes}};
}

// Maps file names to their entries. Empty without a manifest; files are then checked without it.
std::map<std::string, Json> read_manifest(const fs::path& folder) {
  std::map<std::string, Json> entries;
  std::error_code unknown;
  if (!fs::exists(folder / kManifest, unknown)) return entries;
  const std::string source = (folder / kManifest).string();
  const Json manifest = parse_json(content_of(source), source);
  for (const JsonReader& entry : JsonReader(manifest, source).at("files").entries()) {
    const auto name = entry.at("file").as<std::string>();
    require(entries.emplace(name, entry.value()).second, ExitCode::data, source, ": lists ", name, " twice");
  }
  require(!entries.empty(), ExitCode::data, source, ": lists no file");
  return entries;
}

class Folder {
 public:
  Folder(fs::path path, Backend& device) : path_(std::move(path)), device_(device), manifest_(read_manifest(path_)) {
    std::error_code error;
    for (fs::directory_iterator entry(path_, error), end; !error && entry != end; entry.increment(error)) {
      const fs::path name = entry->path().filename();
      if (name.extension() == ".mxg" || name.extension() == ".mxm" || name == kExamples) names_.push_back(name.string());
    }
    require(!error, ExitCode::environment, path_.string(), ": cannot be listed: ", error.message());
    for (const auto& [name, entry] : manifest_) {
      if (std::find(names_.begin(), names_.end(), name) == names_.end()) names_.push_back(name);
    }
    std::sort(names_.begin(), names_.end());
    require(!names_.empty(), ExitCode::usage, path_.string(), ": no golden files (.mxg, .mxm, ", kExamples, ")");
  }

  const std::vector<std::string>& names() const { return names_; }

  // Returns what is wrong with a file, or "".
  std::string problem(const std::string& name) const {
    try {
      std::error_code unknown;
      if (!fs::exists(path_ / name, unknown)) return "manifest: the file is absent";
      const std::string bytes = content_of(path_ / name);
      if (name == kExamples) return worked_examples_difference(bytes, name, device_);
      const GoldenFile file = parse_golden_file(name, bytes);
      const std::string disagreement = against_manifest(name, description(file, bytes.size()));
      return disagreement.empty() ? conformance_difference(file, device_) : disagreement;
    } catch (const Error& error) {
      if (error.code() == ExitCode::internal) throw;
      return error.what();
    }
  }

 private:
  std::string against_manifest(const std::string& name, const Json& found) const {
    if (manifest_.empty()) return "";
    const auto listed = manifest_.find(name);
    if (listed == manifest_.end()) return "manifest: the file is not listed";
    for (const auto& [key, value] : found.members()) {
      if (!listed->second.contains(key)) return text("manifest: no ", key);
      if (listed->second.at(key) != value)
        return text("manifest: ", key, " is ", listed->second.at(key).dump(), ", the header says ", value.dump());
    }
    return "";
  }

  fs::path path_;
  Backend& device_;
  std::map<std::string, Json> manifest_;
  std::vector<std::string> names_;
};

ExitCode conformance(const std::string& path, const std::string& device_name) {
  std::error_code unknown;
  require(fs::is_directory(path, unknown), ExitCode::usage, path, ": no such folder");
  const std::unique_ptr<Backend> device = device_of(device_name);
  const Folder folder(path, *device);
  int64_t failed = 0;
  for (const std::string& name : folder.names()) {
    const std::string problem = folder.problem(name);
    failed += problem.empty() ? 0 : 1;
    std::cout << (problem.empty() ? "pass  " : "FAIL  ") << printable(name) << (problem.empty() ? "" : "  " + printable(problem)) << '\n';
  }
  const auto count = static_cast<int64_t>(folder.names().size());
  std::cout << count_text(count, "file") << ": " << count - failed << " passed, " << failed << " failed\n";
  return failed == 0 ? ExitCode::ok : ExitCode::difference;
}

}  // namespace

Command conformance_command() {
  struct Arguments {
    std::string folder, device = "auto";
  };
  const auto arguments = std::make_shared<Arguments>();
  return {.name = "conformance",
          .summary = "check number formats and GEMMs on a device against golden vectors; a difference is exit code 1",
          .example = "mantissa conformance tests/golden",
          .options = {{"DIR", &arguments->folder, "folder of .mxg, .mxm and worked_examples.json"}, device_option(arguments->device)},
          .run = [arguments] { return conformance(arguments->folder, arguments->device); }};
}

}  // namespace mantissa::tools
