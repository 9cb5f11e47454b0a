// Lists what lies in a checkpoint, a folder of checkpoints or a data set. Needs no config.
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <limits>
#include <memory>

#include "checkpoint/checkpoint_diff.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_search.h"
#include "checkpoint/precision_setup.h"
#include "data/batch.h"
#include "data/token_writer.h"
#include "hf/hf_weights.h"
#include "io/gguf_file.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "mantissa/metrics/events.h"
#include "tools/command.h"

namespace mantissa::tools {
namespace {

namespace fs = std::filesystem;

void show_list(const fs::path& folder, bool one_of_several) {
  const auto list = list_checkpoints(folder);
  if (one_of_several && !list.empty()) std::cout << printable(folder.string()) << '\n';
  if (list.empty()) std::cout << printable(folder.string()) << ": no checkpoints\n";
  for (const CheckpointStatus& status : list) {
    std::cout << status.path.filename().string() << "  ";
    if (status.problem.empty())
      std::cout << "complete  " << count_text(status.samples, "sample") << ", " << count_text(status.tensors, "tensor") << ", "
                << bytes_text(status.bytes);
    else
      std::cout << "DAMAGED  " << printable(status.problem);
    std::cout << (status.latest ? "  (latest)" : "") << (status.best ? "  (best)\n" : "\n");
  }
}

void show_tensor(const std::string& name, const std::string& type, const std::vector<int64_t>& shape) {
  std::cout << "  " << std::left << std::setw(44) << printable(name) << std::right << ' ' << std::setw(5) << printable(type) << ' '
            << shape_text(shape);
}

void show_checkpoint(const CheckpointReader& reader) {
  const Manifest& manifest = reader.manifest();
  std::cout << printable(reader.directory().string()) << '\n'
            << "step          " << manifest.step << '\n'
            << "samples       " << manifest.samples << '\n'
            << "size          " << bytes_text(reader.bytes()) << " in " << count_text(manifest.shards.size(), "shard") << '\n'
            << "manifest      " << reader.hash() << '\n'
            << "build         " << printable(manifest.fingerprints.build) << '\n'
            << "data          " << printable(manifest.fingerprints.dataset) << '\n'
            << "layout        " << printable(manifest.layout) << '\n'
            << "state         " << printable(manifest.state) << '\n'
            << "config        " << printable(parse_json(manifest.config, "config").dump(2), "\n") << '\n'
            << manifest.tensors.size() << " tensors\n";
  for (const ManifestTensor& tensor : manifest.tensors) {
    show_tensor(tensor.name, dtype_name(tensor.dtype), tensor.shape);
    if (tensor.pieces.size() > 1) std::cout << " in " << tensor.pieces.size() << " pieces";
    std::cout << '\n';
  }
  std::cout << "sizes and manifest are right; `mantissa verify` reads the contents\n";
}

// Shows a folder of any architecture: one that mantissa cannot compute can still be looked at.
void show_hf_folder(const std::string& path) {
  const SafetensorsFolder folder{fs::path(path)};
  const Json config = parse_json(hf_file(path, "config.json"), path + "/config.json");
  const Json* const type = config.find("model_type");
  int64_t bytes = 0;
  for (const SafetensorsEntry& entry : folder.entries()) bytes += entry.bytes();
  std::cout << printable(path) << ": a model in Hugging Face's form\n"
            << "architecture  " << (type != nullptr && type->is_string() ? printable(type->string()) : "not named in config.json") << '\n'
            << "size          " << bytes_text(bytes) << " in " << count_text(folder.files().size(), "file") << '\n'
            << folder.entries().size() << " tensors\n";
  for (const SafetensorsEntry& entry : folder.entries()) {
    show_tensor(entry.name, file_dtype_name(entry.dtype), entry.shape);
    std::cout << '\n';
  }
  std::cout << "headers and sizes are right; `mantissa verify` reads the contents of what `mantissa export` wrote\n";
}

void show_gguf(const std::string& path) {
  const GgufFile file(path);
  const GgufHeader& header = file.header();
  int64_t bytes = 0;
  for (const GgufTensor& tensor : header.tensors()) bytes += tensor.bytes;
  const auto architecture = header.string(gguf::kArchitecture);
  std::cout << printable(path) << ": a model in GGUF, version " << header.version() << '\n'
            << "architecture  " << (architecture ? printable(*architecture) : "not named in its keys") << '\n'
            << "size          " << bytes_text(bytes) << " of tensors\n"
            << "keys          " << header.keys().size() << '\n'
            << count_text(header.tensors().size(), "tensor") << '\n';
  for (const GgufTensor& tensor : header.tensors()) {
    show_tensor(tensor.name, ggml_type_info(tensor.type).name, tensor.shape);
    std::cout << '\n';
  }
  std::cout << "keys, tensor infos and sizes are right; `mantissa verify` reads the contents\n";
}

struct TokenStatistics {
  int32_t least = std::numeric_limits<int32_t>::max(), most = -1;
  int64_t documents = 0;
};

TokenStatistics read_all(const TokenFile& file) {
  constexpr int64_t kWindow = 1 << 18;
  std::vector<int32_t> ids(kWindow);
  std::vector<uint8_t> marks(kWindow);
  TokenStatistics statistics;
  for (int64_t begin = 0; begin < file.tokens(); begin += kWindow) {
    const auto count = std::min(kWindow, file.tokens() - begin);
    file.read(begin, count, ids.data(), marks.data());
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      statistics.least = std::min(statistics.least, ids[i]);
      statistics.most = std::max(statistics.most, ids[i]);
      statistics.documents += (marks[i] & starts_document) != 0;
    }
  }
  return statistics;
}

struct InspectArguments {
  std::vector<std::string> paths;
  bool diff = false;
  std::string format = "auto", dtype = "u16";
};

void show_data(const std::string& path, const InspectArguments& arguments) {
  const Tokenizer bytes = Tokenizer::bytes();
  const TokenFile file(path, {.format = *choice_of<DataFormat>(arguments.format),
                              .dtype = *choice_of<TokenDtype>(arguments.dtype),
                              .tokenizer = &bytes,
                              .vocab_size = std::numeric_limits<int32_t>::max(),
                              .eod_id = {}});
  const TokenStatistics statistics = read_all(file);
  const bool tokenized_here = is_text(file.format()) && file.examples().examples == 0;
  std::cout << printable(path) << ": " << choice_name(file.format()) << ", " << file.tokens()
            << (tokenized_here ? " bytes of text" : " tokens");
  const ExampleCounts& examples = file.examples();
  if (examples.examples > 0)
    std::cout << ", " << count_text(examples.examples, "example") << " with " << count_text(examples.targets, "target");
  if (file.tokens() > 0) std::cout << ", ids " << statistics.least << " to " << statistics.most;
  if (file.has_documents() && examples.examples == 0) std::cout << ", " << count_text(statistics.documents, "document");
  std::cout << '\n';
  for (const std::string& part : file.files()) {
    const FileFingerprint print = fingerprint(part);
    std::cout << "  " << printable(part) << ": " << print.bytes << " bytes, fingerprint " << print.hash << '\n';
  }
}

void show(const std::string& path, const InspectArguments& arguments) {
  if (fs::path(path).filename() == "latest" || is_pointer(path)) return show_checkpoint(open_checkpoint(path));
  std::error_code unknown;
  if (is_gguf_file(path)) return show_gguf(path);
  if (is_published_model(path)) return show_hf_folder(path);
  if (fs::is_directory(path, unknown)) {
    const NamedCheckpoint named = find_checkpoint(path);
    return named.name.empty() ? show_list(named.folder, arguments.paths.size() > 1) : show_checkpoint(open_checkpoint(path));
  }
  for (const std::string& file : expand_paths(path)) show_data(file, arguments);
}

void show_line(const std::string& name, const std::string& what) {
  std::cout << "  " << std::left << std::setw(44) << printable(name) << ' ' << printable(what) << '\n';
}

void show_differences(const std::vector<TensorDifference>& differences, size_t tensors) {
  if (differences.empty())
    std::cout << "all " << tensors << " tensors are equal\n";
  else
    std::cout << count_text(differences.size(), "tensor") << (differences.size() == 1 ? " differs\n" : " differ\n");
  for (const TensorDifference& difference : differences) show_line(difference.name, difference.what);
}

ExitCode show_folder_difference(const std::string& first, const std::string& second) {
  SafetensorsFolder a{std::filesystem::path(first)}, b{std::filesystem::path(second)};
  const auto differences = diff_folders(a, b);
  show_differences(differences, a.entries().size());
  return differences.empty() ? ExitCode::ok : ExitCode::difference;
}

ExitCode show_difference(const std::string& first, const std::string& second) {
  CheckpointReader a = open_checkpoint(first), b = open_checkpoint(second);
  const auto differences = diff_checkpoints(a, b);
  std::cout << "step " << a.manifest().step << " and step " << b.manifest().step << ": ";
  show_differences(differences, a.manifest().tensors.size());
  const auto codes = codes_that_differ(a.manifest().plan, b.manifest().plan);
  if (!codes.empty()) std::cout << "codes of " << count_text(codes.size(), "weight") << " differ\n";
  for (const CodesDifference& difference : codes) show_line(difference.weight, difference.what);
  return differences.empty() && codes.empty() ? ExitCode::ok : ExitCode::difference;
}

ExitCode inspect(const InspectArguments& arguments) {
  if (arguments.diff) {
    require(arguments.paths.size() == 2, ExitCode::usage, "inspect --diff: needs two checkpoints, got ", arguments.paths.size());
    const bool gguf = is_gguf_file(arguments.paths[0]) || is_gguf_file(arguments.paths[1]);
    require(!gguf, ExitCode::usage, "inspect --diff: to compare a GGUF file with another model, use verify --against");
    const bool folder = is_published_model(arguments.paths[0]), other = is_published_model(arguments.paths[1]);
    require(folder == other, ExitCode::usage, "inspect --diff: to compare an export with a checkpoint, use verify --against");
    return folder ? show_folder_difference(arguments.paths[0], arguments.paths[1])
                  : show_difference(arguments.paths[0], arguments.paths[1]);
  }
  for (const std::string& path : arguments.paths) show(path, arguments);
  return ExitCode::ok;
}

}  // namespace

Command inspect_command() {
  const auto arguments = std::make_shared<InspectArguments>();
  return {
      .name = "inspect",
      .summary = "list checkpoints (manifests and sizes; verify reads the bytes), show one, compare two, or describe token and text files",
      .example =
          "mantissa inspect runs/quickstart/checkpoints\n"
          "mantissa inspect --diff runs/quickstart/checkpoints/step-00000350 runs/quickstart/checkpoints/step-00000700",
      .options = {{"PATH", &arguments->paths,
                   "run folder, folder of checkpoints, checkpoint, export, GGUF file, or data file, glob or Megatron prefix"},
                  {.name = "--diff",
                   .target = &arguments->diff,
                   .description =
                       "list the tensors that differ between two checkpoints or two exports, and in checkpoints the weights and experts "
                       "whose codes differ (exit code 1)"},
                  {"--format", &arguments->format, "format of data files", choice_names<DataFormat>()},
                  {"--dtype", &arguments->dtype, "width of the ids of a raw nanoGPT file", choice_names<TokenDtype>()}},
      .run = [arguments] { return inspect(*arguments); }};
}

}  // namespace mantissa::tools
