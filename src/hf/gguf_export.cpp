#include "hf/gguf_export.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hf/gguf_model.h"
#include "mantissa/base/log.h"
#include "mantissa/base/version.h"
#include "mantissa/formats/element.h"
#include "mantissa/formats/swizzle.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRowsElements = 2 << 20;
constexpr int64_t kAllF32 = 0, kMostlyBf16 = 32, kMostlyMxfp4 = 38;  // general.file_type
constexpr const char *kTensorHashes = "mantissa.tensor_xxh64", *kOwnHash = "mantissa.xxh64";

std::span<const std::byte> raw_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

// Returns the hash of keys and tensor infos, without the key that holds it.
Hash64 front_hash(const GgufHeader& header) {
  StreamHash hash;
  for (const auto& [key, value] : header.keys()) {
    if (key == kOwnHash) continue;
    hash.update(raw_bytes(text(key, '\n', static_cast<int>(value.type), ' ', static_cast<int>(value.element), ' ', value.count, '\n')));
    hash.update(raw_bytes(header.front().substr(static_cast<size_t>(value.begin), static_cast<size_t>(value.end - value.begin))));
  }
  for (const GgufTensor& tensor : header.tensors())
    hash.update(raw_bytes(text(tensor.name, ' ', ggml_type_info(tensor.type).name, ' ', shape_text(tensor.shape), '\n')));
  return hash.finish();
}

bool is_of_router(const ForwardWeights& types, const ArchitectureTensor& tensor) {
  return types.module_of(tensor.parameter).module.kind == ModuleKind::router;
}

}  // namespace

void for_file_rows(const ArchitectureTensor& tensor, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t rows = tensor.rows(), step = std::max<int64_t>(1, kRowsElements / tensor.columns());
  for (int64_t first = 0; first < rows; first += step) body(first, std::min(rows, first + step));
}

std::vector<std::byte> file_rows(const ArchitectureTensor& tensor, int64_t begin, int64_t end,
                                 const std::function<std::vector<std::byte>(const RowRun&)>& read) {
  std::vector<std::byte> out;
  for (const RowRun& run : tensor.runs) {
    const RowRun part = rows_between(run, begin, end);
    if (part.rows == 0) continue;
    const std::vector<std::byte> rows = read(part);
    const size_t width = rows.size() / static_cast<size_t>(part.rows);
    out.resize(static_cast<size_t>(end - begin) * width);
    for (int64_t row = 0; row < part.rows; ++row)
      std::memcpy(out.data() + static_cast<size_t>(part.file_row - begin + row * part.step) * width,
                  rows.data() + static_cast<size_t>(row) * width, width);
  }
  return out;
}

std::vector<std::byte> mxfp4_blocks(std::span<const std::byte> codes, std::span<const std::byte> scales) {
  constexpr size_t kHalf = kMxfp4Elements / 2;
  std::vector<std::byte> out(scales.size() * kMxfp4Bytes);
  for (size_t i = 0; i < scales.size(); ++i) {
    const auto code = [&](size_t element) {
      return unpack_nibble(std::to_integer<uint8_t>(codes[i * kHalf + element / 2]), static_cast<int64_t>(element));
    };
    const std::span<std::byte> block = std::span(out).subspan(i * kMxfp4Bytes, kMxfp4Bytes);
    block[0] = scales[i];
    for (size_t j = 0; j < kHalf; ++j) block[1 + j] = std::byte{pack_nibbles(code(j), code(j + kHalf))};
  }
  return out;
}

GgufContent::GgufContent(ExportSource& source, const GgufOptions& options)
    : options_(options), architecture_(architecture_of(source.model->config.model)) {
  const ModelConfig& model = source.model->config.model;
  remarks_.differences = gguf_differences(architecture_, model);
  add_keys(source);
  require(remarks_.differences.empty() || options.allow_different, ExitCode::usage,
          "llama.cpp computes this model otherwise than mantissa, or cannot load it:\n  ", joined(remarks_.differences, "\n  "),
          "\nuse it without these, take --format hf, or export it all the same with --allow-different");
  for (const ArchitectureTensor& tensor : architecture_tensors(architecture_, model, ExportFormat::gguf)) add_item(tensor, source);
  rope_factors_ = gguf_rope_factors(architecture_, model);
  const auto count = [&](GgmlType type) { return std::ranges::count(items_, type, &Item::type); };
  require(
      options.weights == ExportWeights::dequantized || count(GgmlType::mxfp4) > 0 || std::ranges::count(items_, true, &Item::decoded) > 0,
      ExitCode::usage, "packed weights: no recipe of the plan quantizes a weight, so there is nothing to pack: take dequantized weights");
  keys_.add_u32(gguf::kFileType, count(GgmlType::mxfp4) > 0 ? kMostlyMxfp4 : count(GgmlType::bf16) > 0 ? kMostlyBf16 : kAllF32);
  std::vector<std::string> eight_bits;
  for (const Item& item : items_) {
    const bool four_bits = source.weights->has_mxfp4_inputs(item.tensor.parameter);
    if (item.type == GgmlType::mxfp4 && !four_bits) eight_bits.push_back(item.tensor.name);
  }
  if (eight_bits.empty()) return;
  keys_.add_strings(gguf::kExtraNames, eight_bits);
  keys_.add_bools(gguf::kFourBitInputs, std::vector<bool>(eight_bits.size(), false));
}

void GgufContent::add_keys(const ExportSource& source) {
  const RunConfig& config = source.model->config;
  add_gguf_model(architecture_, config.model, keys_);
  if (config.logging.run_name) keys_.add_string(gguf::kName, *config.logging.run_name);
  GgufRemarks tokenizer = add_gguf_tokenizer(source.files_beside(), *config.model.vocab_size, keys_);
  std::ranges::move(tokenizer.differences, std::back_inserter(remarks_.differences));
  remarks_.notes = std::move(tokenizer.notes);
  remarks_.has_tokenizer = tokenizer.has_tokenizer;
  keys_.add_string(gguf::kVersionOfWriter, version());
  if (const std::optional<ProvenCheckpoint> checkpoint = source.proven()) {
    keys_.add_u32("mantissa.step", checkpoint->step);
    keys_.add_string("mantissa.manifest", checkpoint->manifest);
  }
  if (!source.precision.empty()) keys_.add_strings("mantissa.precision", source.precision);
  if (!remarks_.differences.empty()) keys_.add_strings(gguf::kDifferences, remarks_.differences);
}

void GgufContent::add_item(const ArchitectureTensor& tensor, const ExportSource& source) {
  const ForwardWeights& types = *source.weights;
  const ModulePrecision& module = types.module_of(tensor.parameter);
  const bool matrix = tensor.shape.size() > 1 && tensor.parameter.ends_with(".weight") && !is_of_router(types, tensor);
  if (!matrix) {
    items_.push_back({.tensor = tensor});
    return;
  }
  const auto value_type = [&] {
    return dtype_of_values(tensor, types, options_.dtype, source.folder) == Dtype::bf16 ? GgmlType::bf16 : GgmlType::f32;
  };
  const SimulatedOperands& simulated = module.recipe.simulated;
  const Quantization how = types.quantized(tensor.parameter);
  if (options_.weights == ExportWeights::dequantized || !how) {
    require(options_.weights == ExportWeights::dequantized || !module.recipe.gemms.fprop || !(simulated.weight || simulated.input),
            ExitCode::usage, "packed weights: ", module.module.path, " (recipe ", module.recipe.name,
            ") is trained on simulated operands, which have no codes: take dequantized weights");
    items_.push_back({.tensor = tensor, .type = value_type()});
    return;
  }
  const bool codes = how.format == Format::e2m1;
  const std::string who = text(module.module.path, " (recipe ", module.recipe.name, ", ", how, ")");
  require(!codes || std::cmp_equal(how.block_cols, kMxfp4Elements), ExitCode::usage, who, ": packed weights have blocks of ",
          kMxfp4Elements, ": take dequantized weights");
  require(!codes || module.module.in % static_cast<int64_t>(kMxfp4Elements) == 0, ExitCode::usage, who, ": its rows of ", module.module.in,
          " elements end within a block of ", kMxfp4Elements,
          ", and MXFP4 of GGUF has whole blocks only: take dequantized weights, or leave it in high precision by a rule");
  items_.push_back({.tensor = tensor, .type = codes ? GgmlType::mxfp4 : value_type(), .decoded = !codes});
}

GgufLayout GgufContent::layout(const std::vector<Hash64>& hashes) const {
  std::vector<GgufTensor> tensors;
  for (const Item& item : items_) tensors.push_back({.name = item.tensor.name, .type = item.type, .shape = item.tensor.shape});
  if (!rope_factors_.empty()) tensors.push_back({.name = kRopeFactors, .shape = {std::ssize(rope_factors_)}});
  std::vector<std::string> shown;
  for (size_t i = 0; i < tensors.size(); ++i) shown.push_back(i < hashes.size() ? hashes[i].text() : Hash64().text());
  const auto with = [&](Hash64 own) {
    GgufKeys keys = keys_;
    keys.add_strings(kTensorHashes, shown);
    keys.add_string(kOwnHash, own.text());
    return gguf_layout(keys, tensors);
  };
  const GgufLayout blank = with({});
  return with(front_hash(GgufHeader(blank.front, blank.bytes, "the file")));
}

void GgufContent::write(const Item& item, ForwardWeights& weights, const Put& put) const {
  const ArchitectureTensor& tensor = item.tensor;
  const Dtype dtype = item.type == GgmlType::bf16 ? Dtype::bf16 : Dtype::f32;
  for_file_rows(tensor, [&](int64_t begin, int64_t end) {
    put(file_rows(tensor, begin, end, [&](const RowRun& run) {
      const int64_t first = run.row, last = run.row + run.rows;
      if (item.type != GgmlType::mxfp4)
        return value_rows(tensor, run, dtype, weights, options_.dtype == ExportDtype::bf16 ? "auto or fp32" : "fp32");
      const std::vector<std::byte> scales = weights.scales(tensor.parameter, first, last);
      require(std::ranges::find(scales, std::byte{kScaleNan}) == scales.end(), ExitCode::data, weights.where(), ": a block of ",
              tensor.name, " between rows ", run.file_row, " and ", run.file_row + run.rows * run.step, " holds NaN or Inf: not exported");
      return mxfp4_blocks(weights.codes(tensor.parameter, first, last), scales);
    }));
  });
}

namespace {

// Writes the file as NAME.tmp, with its hashes.
void write_gguf(const GgufContent& content, ForwardWeights& weights, PendingFile& file) {
  const GgufLayout blank = content.layout();
  std::vector<Hash64> hashes;
  file.append(raw_bytes(blank.front));
  const auto append = [&](const GgufTensor& tensor, const auto& write) {
    StreamHash hash;
    write([&](std::span<const std::byte> bytes) {
      hash.update(bytes);
      file.append(bytes);
    });
    hashes.push_back(hash.finish());
    const int64_t over = tensor.bytes % kGgufAlignment;
    if (over > 0) file.append(std::vector<std::byte>(static_cast<size_t>(kGgufAlignment - over)));
  };
  for (size_t i = 0; i < content.items().size(); ++i)
    append(blank.tensors[i], [&](const GgufContent::Put& put) { content.write(content.items()[i], weights, put); });
  if (!content.rope_factors().empty())
    append(blank.tensors.back(), [&](const GgufContent::Put& put) { put(std::as_bytes(std::span(content.rope_factors()))); });
  file.write_front(raw_bytes(content.layout(hashes).front));
  file.sync();
}

}  // namespace

ExportedGguf export_gguf(const fs::path& from, const fs::path& output, const GgufOptions& options, std::unique_ptr<Backend> device,
                         const std::vector<std::string>& precision) {
  ExportSource source(from, std::move(device), precision);
  const GgufContent content(source, options);  // throws all refusals, before anything is written
  std::error_code error;
  require(!fs::exists(fs::symlink_status(output, error)), ExitCode::usage, output.string(), ": exists already; give another name");
  require_output_file(output);
  PendingFile file(output);
  write_gguf(content, *source.weights, file);
  const fs::path written = output.string() + ".tmp";
  verify_gguf(written);
  GgufFile again(written);
  const std::optional<std::string> difference = gguf_difference(again, source);
  source.weights->require_unchanged();
  require(!difference, ExitCode::storage, output.string(), ": what was written is not what was to be: ", difference.value_or(""));
  file.publish();
  for (const std::string& finding : source.findings) log_warning(finding);
  for (const std::string& warning : export_warnings(source.model->config.model, ExportFormat::gguf)) log_warning(warning);
  for (const std::string& line : content.remarks().differences) log_warning(line);
  for (const std::string& line : content.remarks().notes) log_warning(line);
  const std::string rounded = simulated_weights(source.model->plan);
  if (!rounded.empty()) log_warning(rounded);
  ExportedGguf out;
  out.architecture = content.architecture();
  out.tensors = std::ssize(again.header().tensors());
  out.bytes = content.layout().bytes;
  out.simulated = !rounded.empty();
  out.chat_template = source.files_beside().chat_template;
  out.has_tokenizer = content.remarks().has_tokenizer;
  out.codes = std::ranges::count(content.items(), GgmlType::mxfp4, &GgufContent::Item::type);
  out.decoded = std::ranges::count(content.items(), true, &GgufContent::Item::decoded);
  out.lines = gguf_roundings(again, source);
  if (const std::optional<ProvenCheckpoint> checkpoint = source.proven()) out.step = checkpoint->step;
  return out;
}

bool has_gguf_hashes(const fs::path& path) { return GgufFile(path).header().find(kOwnHash) != nullptr; }

int64_t verify_gguf(const fs::path& path) {
  const GgufFile file(path);
  const GgufHeader& header = file.header();
  const auto hashes = header.strings(kTensorHashes);
  const auto own = header.string(kOwnHash);
  require(hashes && own, ExitCode::usage, path.string(), ": has no ", hashes ? kOwnHash : kTensorHashes,
          ", so nothing says what the weights were; --against CHECKPOINT compares them");
  require(*own == front_hash(header).text(), ExitCode::data, path.string(), ": is not what was exported: the hash of its keys differs");
  require(hashes->size() == header.tensors().size(), ExitCode::data, path.string(), ": ", kTensorHashes, " has ", hashes->size(),
          " hashes of ", header.tensors().size(), " tensors");
  for (size_t i = 0; i < hashes->size(); ++i) {
    const GgufTensor& tensor = header.tensors()[i];
    const Hash64 hash = xxh64(tensor.bytes, [&](int64_t at, std::span<std::byte> piece) { file.read(tensor, at, piece); });
    require(hash.text() == (*hashes)[i], ExitCode::data, path.string(), ": ", tensor.name, " is not what was exported: its hash differs");
  }
  return std::ssize(header.tensors());
}

}  // namespace mantissa
