#include "mantissa/hf/export.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <numeric>

#include "hf/export_proof.h"
#include "hf/export_weights.h"
#include "hf/tile_scales.h"
#include "mantissa/base/log.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/checkpoint/config_differences.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/data/end_tokens.h"
#include "mantissa/formats/bf16.h"
#include "mantissa/hf/chat_files.h"
#include "mantissa/hf/export_files.h"
#include "mantissa/io/pending_folder.h"
#include "mantissa/models/model_shape.h"

namespace mantissa {

// Model to export, with the files that lie beside its weights.
struct ExportedSource {
  SavedModel model;
  std::vector<TokenizerFile> files;
  std::optional<Tokenizer> tokenizer = {};
  std::optional<CheckpointReader> checkpoint = {};  // else a folder
  std::unique_ptr<TensorReader> reader = {};
  FolderTypes types = {};
  std::vector<std::string> findings = {};  // about a folder; else empty
};

namespace {

namespace fs = std::filesystem;

bool same_value(float a, float b, bool zeros_alike) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (zeros_alike && a == 0.0F && b == 0.0F);
}

// bf16 holds multiples of 2^-133, and E4M3 codes are multiples of 2^-9: so it holds all codes with this scale, 2^-124, or a larger one.
constexpr std::byte kLeastScaleOfBf16{3};

// Looks at values only where their scales leave it open.
bool bf16_holds(HfWeights& folder, const ArchitectureTensor& tensor) {
  const WeightForm form = folder.form(tensor.parameter);
  if (form.codes.format == Format::e2m1) return true;  // multiples of 2^-128
  bool holds = true;
  std::vector<std::byte> scales;
  std::vector<float> values;
  for_chunks(tensor, [&](const RowRun&, int64_t begin, int64_t end) {
    if (!holds) return;
    if (form.codes) {
      scales.resize(static_cast<size_t>((end - begin + form.codes.block_rows - 1) / form.codes.block_rows * scale_bytes(form)));
      folder.read_codes(tensor.parameter, begin, end, {}, scales);
      if (std::ranges::all_of(scales, [](std::byte scale) { return scale >= kLeastScaleOfBf16; })) return;
    }
    values.resize(static_cast<size_t>((end - begin) * tensor.columns()));
    folder.read_fp32(tensor.parameter, {.start = {begin, 0}, .size = {end - begin, tensor.columns()}}, values);
    holds = std::ranges::all_of(values, [](float value) { return same_value(to_float(to_bf16(value)), value, false); });
  });
  return holds;
}

FolderTypes types_of(HfWeights& weights) {
  FolderTypes types;
  for (const ArchitectureTensor& tensor : weights.tensors()) {
    const WeightForm form = weights.form(tensor.parameter);
    if (form.codes || form.products) types.codes.insert(tensor.name);
    if (weights.file_dtype(tensor) != form.dtype) types.narrow.insert(tensor.name);
    if (const std::optional<FileDtype> scales = weights.tile_scales_dtype(tensor)) types.tile_scales[tensor.name] = *scales;
  }
  types.bf16_holds = [&weights](const ArchitectureTensor& tensor) { return bf16_holds(weights, tensor); };
  return types;
}

ExportedSource folder_source(const fs::path& from) {
  auto weights = std::make_unique<HfWeights>(from);
  const RunConfig config = weights->run_config();
  ExportedSource source{.model = {.config = config, .plan = resolve_plan(config)}, .files = tokenizer_files(*weights)};
  source.types = types_of(*weights);
  source.findings = weights->block_fp8_findings();
  source.reader = std::move(weights);
  return source;
}

std::unique_ptr<ExportedSource> source_at(const fs::path& from) {
  if (is_hf_folder(from)) return std::make_unique<ExportedSource>(folder_source(from));
  CheckpointReader reader = open_checkpoint(from);
  auto source = std::make_unique<ExportedSource>(
      ExportedSource{.model = saved_model(reader), .files = tokenizer_files(reader), .tokenizer = saved_tokenizer(reader)});
  source->checkpoint.emplace(std::move(reader));
  source->reader = std::make_unique<CheckpointWeights>(*source->checkpoint);
  return source;
}

// Hashes the bytes of a tensor as they are in its file.
Hash64 hash_in_file(const fs::path& folder, const SafetensorsLayout& layout, size_t tensor, const Progressed& progressed) {
  const auto [number, begin, end] = layout.place(tensor);
  const File file = File::open(folder / layout.file(number));
  return xxh64(end - begin, [&, first = begin](int64_t at, std::span<std::byte> piece) {
    file.read_at(first + at, piece);
    if (progressed) progressed();
  });
}

// Compares a tensor. One in bf16 may hold the values that forward rounds to it.
std::optional<std::string> tensor_difference(const ArchitectureTensor& tensor, HfWeights& folder, ForwardWeights& weights,
                                             const Progressed& progressed) {
  const bool narrow = folder.file_dtype(tensor) == Dtype::bf16 && weights.rounds(tensor.parameter);
  const bool zeros_alike = weights.quantized(tensor.parameter).rule == ScaleRule::flashinfer;
  std::optional<std::string> found;
  std::vector<float> there, here;
  for_chunks(tensor, [&](const RowRun& run, int64_t begin, int64_t end) {
    if (found) return;
    const int64_t columns = tensor.columns();
    there.resize(static_cast<size_t>((end - begin) * columns));
    here.resize(there.size());
    Box box{.start = {begin}, .size = {end - begin}};
    if (tensor.shape.size() > 1) box = {.start = {begin, 0}, .size = {end - begin, columns}};
    folder.read_fp32(tensor.parameter, box, there);
    weights.read(tensor.parameter, begin, end, here);
    if (progressed) progressed();
    const auto element = [&](size_t i) {
      const auto index = static_cast<int64_t>(i);
      return element_name(tensor, run.file_row + (begin - run.row + index / columns) * run.step, index % columns);
    };
    for (size_t i = 0; i < here.size() && !found; ++i) {
      if (!std::isfinite(there[i])) fail(ExitCode::data, folder.where(), ": ", element(i), " is ", there[i]);
      if (narrow) here[i] = to_float(to_bf16(here[i]));
      if (same_value(there[i], here[i], zeros_alike)) continue;
      found = text(element(i), " is ", there[i], ", forward multiplies by ", here[i]);
    }
  });
  return found;
}

// Holds the files beside the weights, without config.json.
struct FilesBeside {
  std::vector<TokenizerFile> files;
  SpecialTokens special;      // for config.json
  std::string chat_template;  // outcome of take_chat_template()
};

FilesBeside files_beside(const ExportedSource& from) {
  const DataConfig& data = from.model.config.data;
  FilesBeside out{.files = model_files(from.files, from.tokenizer), .special = special_tokens(from.files), .chat_template = ""};
  if (out.special.end.empty()) std::ranges::copy(learned_end_tokens(data, from.tokenizer), std::back_inserter(out.special.end));
  const std::vector<int32_t> taught = taught_end_tokens(data, from.tokenizer);
  for (const int32_t id : taught) add_end_token(id, out.special);
  for (TokenizerFile& file : out.files)
    if (file.name == "generation_config.json") add_end_tokens(taught, out.special, file);
  out.chat_template = take_chat_template(data, out.files);
  return out;
}

// Compares the tensors of part number `part` of `parts`, which have about as many elements each.
std::optional<std::string> difference_of_part(HfWeights& folder, ForwardWeights& weights, int part, int parts,
                                              const Progressed& progressed) {
  int64_t all = 0, before = 0;
  for (const ArchitectureTensor& tensor : folder.tensors()) all += tensor.rows() * tensor.columns();
  for (const ArchitectureTensor& tensor : folder.tensors()) {
    const int64_t elements = tensor.rows() * tensor.columns(), middle = before + elements / 2;
    before += elements;
    if (middle * parts / all != part) continue;
    if (std::optional<std::string> difference = tensor_difference(tensor, folder, weights, progressed)) return difference;
  }
  return {};
}

}  // namespace

std::string simulated_weights(const PrecisionPlan& plan) {
  const auto rounds = [](const ModulePrecision& module) { return module.recipe.simulated.weight && module.recipe.gemms.fprop; };
  const auto first = std::ranges::find_if(plan.modules(), rounds);
  if (first == plan.modules().end()) return "";
  return text("forward rounds ", count_text(std::ranges::count_if(plan.modules(), rounds), "weight"), ", the first of ", first->module.path,
              ", to ", first->recipe.simulated.weight, " (recipe ", first->recipe.name, "); an export has them unrounded");
}

struct ModelExport::Source {
  Source(const fs::path& path, const ExportOptions& how, std::unique_ptr<Backend> device)
      : options(how), from(source_at(path)), weights(*from->reader, from->model.plan, std::move(device)) {}

  // Made where it is needed: a model that no architecture has can still be compared.
  const ExportedWeights& exported() {
    if (!made) made.emplace(weights, from->model.config.model, options, from->types);
    return *made;
  }

  ExportOptions options;
  std::unique_ptr<ExportedSource> from;
  ForwardWeights weights;
  std::optional<ExportedWeights> made;
};

ModelExport::ModelExport(const fs::path& from, const ExportOptions& options, std::unique_ptr<Backend> device)
    : source_(std::make_unique<Source>(from, options, std::move(device))) {}
ModelExport::~ModelExport() = default;

const ModelConfig& ModelExport::model() const { return source_->from->model.config.model; }
ForwardWeights& ModelExport::weights() { return source_->weights; }

const std::string& ModelExport::manifest() const {
  static const std::string kNone;
  return source_->from->checkpoint ? source_->from->checkpoint->hash() : kNone;
}

std::vector<std::string> ModelExport::warnings() const {
  std::vector<std::string> warnings = source_->from->findings;
  std::ranges::move(export_warnings(source_->from->model.config.model, own_tokenizer(source_->from->files, source_->from->tokenizer)),
                    std::back_inserter(warnings));
  if (std::string rounded = simulated_weights(); !rounded.empty()) warnings.push_back(std::move(rounded));
  return warnings;
}

std::string ModelExport::simulated_weights() const { return mantissa::simulated_weights(source_->from->model.plan); }

ExportedModel ModelExport::summary() const {
  const SafetensorsLayout& layout = source_->exported().layout();
  ExportedModel out{.architecture = source_->exported().architecture(),
                    .tensors = std::ssize(layout.tensors()),
                    .bytes = layout.bytes(),
                    .simulated = !simulated_weights().empty()};
  if (source_->from->checkpoint) out.step = source_->from->checkpoint->manifest().step;
  out.chat_template = files_beside(*source_->from).chat_template;
  return out;
}

void ModelExport::begin(const fs::path& folder) const { source_->exported().layout().create(folder); }

std::vector<Hash64> ModelExport::write(const fs::path& folder, int part, int parts, const Progressed& progressed) {
  const SafetensorsLayout& layout = source_->exported().layout();
  const size_t first = layout.first_of(part, parts), last = layout.first_of(part + 1, parts);
  SafetensorsWriter writer(folder, layout, first, last);
  std::vector<Hash64> hashes;
  for (size_t i = first; i < last; ++i) {
    StreamHash hash;
    source_->exported().write(i, source_->weights, [&](std::span<const std::byte> bytes) {
      hash.update(bytes);
      writer.write(bytes);
      if (progressed) progressed();
    });
    hashes.push_back(hash.finish());
  }
  writer.finish();
  for (size_t i = first; i < last; ++i) {
    require(hash_in_file(folder, layout, i, progressed) == hashes[i - first], ExitCode::storage, folder.string(), ": ",
            layout.tensors()[i].name, " is not what was written");
  }
  return hashes;
}

void ModelExport::finish(const fs::path& folder, const std::vector<Hash64>& hashes) const {
  const ExportedWeights& exported = source_->exported();
  const ExportedSource& from = *source_->from;
  require(hashes.size() == exported.layout().tensors().size(), ExitCode::internal, folder.string(), ": ", hashes.size(), " hashes of ",
          exported.layout().tensors().size(), " tensors");
  FilesBeside beside = files_beside(from);
  std::vector<TokenizerFile>& files = beside.files;
  files.push_back({.name = "config.json",
                   .bytes = architecture_config(from.model.config.model, exported.common_dtype(), beside.special, exported.quantization(),
                                                router_loss_keys(from.files))});
  if (source_->options.weights == ExportWeights::packed && source_->options.convention == Convention::modelopt)
    files.push_back({.name = kModeloptSideFile, .bytes = modelopt_side_file(exported.modules())});
  for (const TokenizerFile& file : files) write_export_file(folder, file.name, file.bytes);
  std::vector<ProvenTensor> tensors;
  for (size_t i = 0; i < hashes.size(); ++i) {
    tensors.push_back(exported.description(i));
    tensors.back().hash = hashes[i];
  }
  std::optional<ProvenCheckpoint> checkpoint;
  if (from.checkpoint) checkpoint = {.step = from.checkpoint->manifest().step, .manifest = from.checkpoint->hash()};
  const bool has_convention = !exported.quantization().empty() && exported.architecture() != Architecture::gpt_oss;
  write_export_proof(folder, checkpoint, source_->options, has_convention, files, tensors);
}

std::optional<std::string> ModelExport::difference(HfWeights& written, int part, int parts, const Progressed& progressed) {
  std::optional<std::string> difference = difference_of_part(written, weights(), part, parts, progressed);
  if (!difference && part == 0) {
    const std::vector<std::string> schemes = export_scheme_differences(written, weights());
    if (!schemes.empty()) difference = schemes.front();
  }
  weights().require_unchanged();
  if (!difference) return {};
  return text("what was written is not what was to be: ", *difference);
}

ExportedModel export_model(const fs::path& from, const fs::path& output, const ExportOptions& options, std::unique_ptr<Backend> device) {
  ModelExport model(from, options, std::move(device));
  const ExportedModel summary = model.summary();  // and all refusals
  PendingFolder pending(output);
  model.begin(pending.path());
  model.finish(pending.path(), model.write(pending.path(), 0, 1));
  HfWeights written(pending.path());
  const std::optional<std::string> difference = model.difference(written, 0, 1);
  require(!difference, ExitCode::storage, output.string(), ": ", difference.value_or(""));
  pending.publish();
  for (const std::string& warning : model.warnings()) log_warning(warning);
  for (const std::string& finding : written.ignore_list_findings()) log_warning(finding);
  return summary;
}

void check_export(const RunConfig& config, ConfigReport& report) {
  if (!config.checkpoint.exported || report.failed("model") || report.failed("precision")) return;
  ModelConfig model = config.model;
  // Where only the data can tell the vocabulary, any size shows the same: here one without padding.
  if (!model.vocab_size) model.vocab_size = std::lcm(model.pad_vocab_to, int64_t{128});
  ConfigReport refused;
  const PrecisionPlan plan = PrecisionPlan::resolve(config.precision, model_shape(model), refused);
  if (!refused.ok()) return;
  try {
    const ForwardTypes types(plan);
    const ExportedWeights exported(types, model, *config.checkpoint.exported);
    if (config.checkpoint.exported->dtype != ExportDtype::bf16) return;
    for (const ModulePrecision& module : plan.modules()) {
      const bool values = !types.quantized(module.module.path + ".weight") || module.module.bias > 0;
      if (values && module.recipe.compute == Dtype::f32 && module.module.kind != ModuleKind::router)
        return report.error("checkpoint.export.dtype",
                            text("bf16 does not hold ", module.module.path, ", which computes in fp32: take auto or fp32"));
    }
  } catch (const Error& error) {
    if (error.code() != ExitCode::usage) throw;
    report.error("checkpoint.export", error.what());
  }
}

int64_t export_bytes(const ModelConfig& model, const PrecisionPlan& plan, const ExportOptions& options) {
  const ForwardTypes types(plan);
  return ExportedWeights(types, model, options).layout().bytes();
}

std::vector<std::string> export_warnings(const ModelConfig& model, const std::optional<Tokenizer>& tokenizer) {
  std::vector<std::string> warnings;
  if (model.moe && model.moe->capacity_factor)
    warnings.emplace_back("model.moe.capacity_factor: training dropped assignments, a server drops none, as eval does");
  if (model.moe && !model.moe->dense_layers.empty())
    warnings.emplace_back(
        "model.moe.dense_layers: layers without experts among others are read by transformers and vLLM only, not by llama.cpp");
  if (tokenizer)
    warnings.emplace_back(
        "tokenizer.json: llama.cpp knows tokenizers by their pieces of a certain text, and refuses this one, which has no merges");
  return warnings;
}

std::vector<std::string> export_model_differences(const HfWeights& folder, const ModelConfig& model) {
  return forward_differences(model, folder.config().model);
}

std::vector<std::string> export_scheme_differences(const HfWeights& folder, const ForwardTypes& types) {
  std::vector<std::string> differences;
  for (const auto& [module, here] : folder.packed_modules()) {
    const bool there = types.quantizes_inputs(module + ".weight");
    const auto how = [](bool quantized) { return quantized ? "quantized" : "in high precision"; };
    if (there != here.inputs)
      differences.push_back(text(module, ": inputs are ", how(there), " in the checkpoint, ", how(here.inputs), " here"));
    const Quantization& input = types.module_of(module + ".weight").recipe.input;
    if (!there || !here.inputs) continue;
    if (!as_servers_quantize(input, here.block))
      differences.push_back(text(module, ": inputs are ", input, " in the checkpoint, and servers quantize them by rceil with any scale"));
    else if (here.block == kTile && input.block_cols != here.block)
      differences.push_back(text(module, ": inputs are ", input, " in the checkpoint, and servers quantize them in blocks of 128 here"));
  }
  return differences;
}

std::optional<std::string> export_difference(HfWeights& folder, ForwardWeights& weights) {
  return difference_of_part(folder, weights, 0, 1, {});
}

}  // namespace mantissa
