#include "hf/export.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <string_view>

#include "checkpoint/checkpoint_search.h"
#include "checkpoint/saved_model.h"
#include "hf/export_files.h"
#include "hf/tile_scales.h"
#include "io/pending_folder.h"
#include "io/safetensors.h"
#include "json/json_fields.h"
#include "mantissa/base/log.h"
#include "mantissa/base/version.h"
#include "mantissa/formats/bf16.h"
#include "models/model_shape.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr int kFormatVersion = 2;

// A tensor as the file describes it.
struct NamedTensor {
  std::string tensor, dtype, xxh64;
  std::vector<int64_t> shape;

  void fields(auto& v) {
    v("tensor", tensor);
    v("dtype", dtype);
    v("shape", shape);
    v("xxh64", xxh64);
  }
};

// The options of an export as far as they had an effect.
struct ProvenOptions {
  ExportWeights weights = {};
  std::optional<Convention> convention = {};  // none: the weights are values, or in the form of gpt-oss
  ExportDtype dtype = {};

  void fields(auto& v) {
    v("weights", weights);
    v("convention", convention);
    v("dtype", dtype);
  }
  bool are(const ExportOptions& options) const {
    return weights == options.weights && convention.value_or(options.convention) == options.convention && dtype == options.dtype;
  }
};

// Part of the file that is read. The rest is for people and other readers, and is covered by its hash.
struct ExportProof {
  std::optional<ProvenCheckpoint> checkpoint;
  std::optional<ProvenOptions> options;      // none: of an earlier version
  std::map<std::string, std::string> files;  // their hashes
  std::vector<NamedTensor> tensors;
  std::string xxh64;

  void fields(auto& v) {
    v("checkpoint", checkpoint);
    v("options", options, limits::later);
    v("files", files);
    v("tensors", tensors);
    v("xxh64", xxh64);
  }
};

std::string type_text(const std::string& dtype, const std::vector<int64_t>& shape) { return text(dtype, " ", shape_text(shape)); }

// Returns the hash of all members but the hash itself.
std::string proof_hash(Json proof) {
  proof.members().erase("xxh64");
  return xxh64(proof.dump()).text();
}

Json read_proof(const fs::path& folder) {
  const std::string source = (folder / kProofFile).string();
  std::error_code error;
  require(fs::exists(folder / kProofFile, error), ExitCode::usage, source,
          ": there is none, so nothing says what the weights were; --against CHECKPOINT compares them");
  Json proof = parse_json(hf_file(folder, kProofFile), source);
  require(proof.get("format_version") == kFormatVersion, ExitCode::data, source, ": format_version: must be ", kFormatVersion, ", got ",
          proof.get("format_version").shown());
  return proof;
}

void verify_file(const fs::path& folder, const std::string& name, const std::string& hash) {
  require(is_plain_file_name(name), ExitCode::data, (folder / kProofFile).string(), ": files: ", Json(name).shown(),
          " is no name of a file");
  std::error_code error;
  require(fs::exists(folder / name, error), ExitCode::data, folder.string(), ": lacks ", name, ", which ", kProofFile, " names");
  require(xxh64(hf_file(folder, name)).text() == hash, ExitCode::data, folder.string(), ": ", name,
          " is not what was exported: its hash differs");
}

Json entry_of(const ProvenTensor& tensor) {
  Json entry = {{"tensor", tensor.name}, {"module", tensor.module}, {"dtype", tensor.dtype},
                {"shape", tensor.shape}, {"format", nullptr},       {"xxh64", tensor.hash.text()}};
  if (!tensor.how) return entry;
  entry["format"] = format_name(tensor.how.format);
  entry["block"] = {tensor.how.block_rows, tensor.how.block_cols};
  entry["rule"] = scale_rule_name(tensor.how.rule);
  if (tensor.how.range != ScaleRange{}) entry["scale_range"] = {tensor.how.range.least - 127, tensor.how.range.most - 127};
  return entry;
}

void require_all_named(const SafetensorsFolder& files, const std::vector<NamedTensor>& tensors, const fs::path& folder) {
  std::set<std::string_view> named;
  for (const NamedTensor& tensor : tensors) {
    require(named.insert(tensor.tensor).second, ExitCode::data, (folder / kProofFile).string(), ": names ", tensor.tensor, " twice");
    require(files.find(tensor.tensor) != nullptr, ExitCode::data, folder.string(), ": lacks ", tensor.tensor, ", which ", kProofFile,
            " names");
  }
  for (const SafetensorsEntry& entry : files.entries())
    require(named.contains(entry.name), ExitCode::data, folder.string(), ": holds ", entry.name, ", which ", kProofFile, " does not name");
}

void verify_tensor(SafetensorsFolder& files, const NamedTensor& tensor, const fs::path& folder) {
  const SafetensorsEntry* const found = files.find(tensor.tensor);
  const std::string here = type_text(file_dtype_name(found->dtype), found->shape), exported = type_text(tensor.dtype, tensor.shape);
  require(here == exported, ExitCode::data, folder.string(), ": ", tensor.tensor, " is not what was exported: it is ", here, ", and was ",
          exported);
  const Hash64 hash = xxh64(found->bytes(), [&](int64_t at, std::span<std::byte> piece) { files.read(*found, at, piece); });
  require(hash.text() == tensor.xxh64, ExitCode::data, folder.string(), ": ", tensor.tensor, " is not what was exported: its hash differs");
}

}  // namespace

void write_export_proof(const fs::path& folder, const std::optional<ProvenCheckpoint>& checkpoint, const ExportOptions& options,
                        bool has_convention, const std::vector<TokenizerFile>& files, const std::vector<ProvenTensor>& tensors) {
  Json hashes = Json::Members(), entries = Json::Entries(), from;
  for (const TokenizerFile& file : files) hashes[file.name] = xxh64(file.bytes).text();
  for (const ProvenTensor& tensor : tensors) entries.entries().push_back(entry_of(tensor));
  if (checkpoint) from = {{"step", checkpoint->step}, {"manifest", checkpoint->manifest}};
  ProvenOptions proven{.weights = options.weights, .dtype = options.dtype};
  if (has_convention) proven.convention = options.convention;
  Json proof = {{"format_version", kFormatVersion}, {"mantissa", version()},
                {"checkpoint", std::move(from)},    {"options", parse_json(json_text(proven), "options", ExitCode::internal)},
                {"files", std::move(hashes)},       {"tensors", std::move(entries)}};
  proof["xxh64"] = proof_hash(proof);
  write_export_file(folder, kProofFile, proof.dump(1) + "\n");
}

int64_t verify_export(const fs::path& folder) {
  SafetensorsFolder files(folder);
  const Json whole = read_proof(folder);
  const std::string source = (folder / kProofFile).string();
  const auto proof = JsonReader(whole, source).as<ExportProof>();
  for (const auto& [name, hash] : proof.files) verify_file(folder, name, hash);
  require_all_named(files, proof.tensors, folder);
  for (const fs::path& file : files.files())
    require(SafetensorsFile(file).metadata() == SafetensorsMetadata{{"format", "pt"}}, ExitCode::data, file.string(),
            ": is not what was exported: its __metadata__ differs");
  require(proof.xxh64 == proof_hash(whole), ExitCode::data, source, ": is not what was exported: its hash of itself differs");
  for (const NamedTensor& tensor : proof.tensors) verify_tensor(files, tensor, folder);
  return std::ssize(proof.tensors);
}

bool is_export_of(const fs::path& folder, const std::string& manifest, const ExportOptions& options) {
  std::error_code error;
  if (!fs::exists(folder / kProofFile, error)) return false;
  const Json whole = read_proof(folder);
  const auto proof = JsonReader(whole, (folder / kProofFile).string()).as<ExportProof>();
  return proof.checkpoint && proof.checkpoint->manifest == manifest && proof.options && proof.options->are(options);
}

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
