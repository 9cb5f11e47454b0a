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
#include "hf/export_files.h"
#include "hf/load_model.h"
#include "hf/mlx.h"
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

// The options of an export in its mantissa.json; the convention is left out where it had no effect.
struct ProvenOptions {
  ExportFormat format = {};  // hf is not written
  ExportWeights weights = {};
  std::optional<Convention> convention = {};  // none: the weights are values, or in the form of gpt-oss
  ExportDtype dtype = {};
  std::vector<std::string> precision = {};  // other values than those of the model; none are not written

  void fields(auto& v) {
    v("format", format, limits::later);
    v("weights", weights);
    v("convention", convention);
    v("dtype", dtype);
    v("precision", precision, limits::later);
  }
};

// The members of mantissa.json that mantissa reads. The others are for people and other programs; the hash `xxh64` covers them too.
struct ExportProof {
  std::optional<ProvenCheckpoint> checkpoint;
  std::optional<ProvenOptions> options;      // none: of an earlier version
  std::map<std::string, std::string> files;  // their hashes
  std::vector<ProvenTensor> tensors;
  std::vector<std::string> differences = {};  // things that the program of the format computes otherwise; none are not written
  std::string xxh64;

  void fields(auto& v) {
    v("checkpoint", checkpoint);
    v("options", options, limits::later);
    v("differences", differences, limits::later);
    v("files", files);
    v("tensors", tensors);
    v("xxh64", xxh64);
  }
};

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

}  // namespace

void write_export_proof(const fs::path& folder, const std::optional<ProvenCheckpoint>& checkpoint, const ExportOptions& options,
                        const std::vector<std::string>& precision, bool has_convention, const std::vector<TokenizerFile>& files,
                        const std::vector<ProvenTensor>& tensors, const std::vector<std::string>& differences) {
  Json hashes = Json::Members(), entries = Json::Entries(), from;
  for (const TokenizerFile& file : files) hashes[file.name] = xxh64(file.bytes).text();
  for (const ProvenTensor& tensor : tensors) {
    const Quantization& how = tensor.how;
    Json entry = {{"tensor", tensor.name}, {"module", tensor.module}, {"dtype", tensor.dtype},
                  {"shape", tensor.shape}, {"format", nullptr},       {"xxh64", tensor.xxh64}};
    if (how) {
      entry["format"] = format_name(how.format);
      entry["block"] = {how.block_rows, how.block_cols};
      entry["rule"] = scale_rule_name(how.rule);
      if (how.format == Format::nvfp4) entry["tensor_exponent"] = int64_t{how.tensor_exponent};
      if (how.range != ScaleRange{}) entry["scale_range"] = {how.range.least - 127, how.range.most - 127};
    }
    entries.entries().push_back(std::move(entry));
  }
  if (checkpoint) from = {{"step", checkpoint->step}, {"manifest", checkpoint->manifest}};
  ProvenOptions proven{.format = options.format, .weights = options.weights, .dtype = options.dtype, .precision = precision};
  if (has_convention) proven.convention = options.convention;
  Json stated = parse_json(json_text(proven), "options", ExitCode::internal);
  if (options.format == ExportFormat::hf) stated.members().erase("format");
  if (precision.empty()) stated.members().erase("precision");
  Json proof = {{"format_version", kFormatVersion}, {"mantissa", version()},      {"checkpoint", std::move(from)},
                {"options", std::move(stated)},     {"files", std::move(hashes)}, {"tensors", std::move(entries)}};
  for (const std::string& one : differences) proof["differences"].entries().emplace_back(one);
  proof["xxh64"] = proof_hash(proof);
  write_new_file(folder / kProofFile, proof.dump(1) + "\n");
}

int64_t verify_export(const fs::path& folder) {
  SafetensorsFolder files(folder);
  const Json whole = read_proof(folder);
  const std::string where = folder.string(), source = (folder / kProofFile).string();
  const auto proof = JsonReader(whole, source).as<ExportProof>();
  for (const auto& [name, hash] : proof.files) {
    require(is_plain_file_name(name), ExitCode::data, source, ": files: ", Json(name).shown(), " is no name of a file");
    std::error_code error;
    require(fs::exists(folder / name, error), ExitCode::data, where, ": lacks ", name, ", which ", kProofFile, " names");
    require(xxh64(hf_file(folder, name)).text() == hash, ExitCode::data, where, ": ", name, " is not what was exported: its hash differs");
  }
  std::set<std::string_view> named;
  for (const ProvenTensor& tensor : proof.tensors) {
    require(named.insert(tensor.name).second, ExitCode::data, source, ": names ", tensor.name, " twice");
    require(files.find(tensor.name) != nullptr, ExitCode::data, where, ": lacks ", tensor.name, ", which ", kProofFile, " names");
  }
  for (const SafetensorsEntry& entry : files.entries())
    require(named.contains(entry.name), ExitCode::data, where, ": holds ", entry.name, ", which ", kProofFile, " does not name");
  const bool mlx = proof.options && proof.options->format == ExportFormat::mlx;
  const char* const format = mlx ? choice_name(ExportFormat::mlx) : "pt";
  for (const fs::path& file : files.files())
    require(SafetensorsFile(file).metadata() == SafetensorsMetadata{{"format", format}}, ExitCode::data, file.string(),
            ": is not what was exported: its __metadata__ differs");
  require(proof.xxh64 == proof_hash(whole), ExitCode::data, source, ": is not what was exported: its hash of itself differs");
  for (const ProvenTensor& tensor : proof.tensors) {
    const SafetensorsEntry& found = *files.find(tensor.name);
    const std::string here = text(found.dtype, " ", shape_text(found.shape)), exported = text(tensor.dtype, " ", shape_text(tensor.shape));
    require(here == exported, ExitCode::data, where, ": ", tensor.name, " is not what was exported: it is ", here, ", and was ", exported);
    const Hash64 hash = xxh64(found.bytes(), [&](int64_t at, std::span<std::byte> piece) { files.read(found, at, piece); });
    require(hash.text() == tensor.xxh64, ExitCode::data, where, ": ", tensor.name, " is not what was exported: its hash differs");
  }
  return std::ssize(proof.tensors);
}

bool is_export_of(const fs::path& folder, const std::string& manifest, const ExportOptions& options) {
  std::error_code error;
  if (!fs::exists(folder / kProofFile, error)) return false;
  const Json whole = read_proof(folder);
  const auto proof = JsonReader(whole, (folder / kProofFile).string()).as<ExportProof>();
  const std::optional<ProvenOptions>& made = proof.options;
  return proof.checkpoint && proof.checkpoint->manifest == manifest && made && made->precision.empty() && made->format == options.format &&
         made->weights == options.weights && made->convention.value_or(options.convention) == options.convention &&
         made->dtype == options.dtype;
}

std::string simulated_weights(const PrecisionPlan& plan) {
  const auto rounds = [](const ModulePrecision& module) { return module.recipe.simulated.weight && module.recipe.gemms.fprop; };
  const auto first = std::ranges::find_if(plan.modules(), rounds);
  if (first == plan.modules().end()) return "";
  return text("forward rounds ", count_text(std::ranges::count_if(plan.modules(), rounds), "weight"), ", the first of ", first->module.path,
              ", to ", first->recipe.simulated.weight, " (recipe ", first->recipe.name, "); an export has them unrounded");
}

std::string unquantized_inputs(const HfWeights& folder, const PrecisionPlan& plan) {
  const std::map<std::string, PackedScheme> packed = folder.packed_modules();
  const auto quantizes = [&](const ModulePrecision& module) {
    const Recipe& recipe = module.recipe;
    return has_gemm(module.module.kind) && recipe.gemms.fprop && (recipe.input || recipe.simulated.input) &&
           !packed.contains(module.module.path);
  };
  const auto first = std::ranges::find_if(plan.modules(), quantizes);
  if (first == plan.modules().end()) return "";
  return text(folder.format() == ExportFormat::mlx ? "mlx-lm does" : "servers do", " not quantize inputs of ",
              count_text(std::ranges::count_if(plan.modules(), quantizes), "module"), ", the first of ", first->module.path,
              "; forward here does, to ", first->recipe.input ? text(first->recipe.input) : text(first->recipe.simulated.input));
}

std::vector<std::string> export_deviations(HfWeights& folder) {
  if (folder.format() != ExportFormat::mlx) return {};
  const fs::path place = folder.where();
  std::error_code error;
  if (fs::exists(place / kProofFile, error)) {
    const Json whole = read_proof(place);
    const auto proof = JsonReader(whole, (place / kProofFile).string()).as<ExportProof>();
    if (!proof.differences.empty()) return proof.differences;
  }
  return mlx_differences(folder.config().architecture, folder.config().model);
}

std::vector<std::string> server_lines(HfWeights& folder, const ForwardWeights& types) {
  std::vector<std::string> lines;
  const std::string inputs = unquantized_inputs(folder, types.plan());
  if (!inputs.empty()) lines.push_back(inputs);
  if (folder.format() != ExportFormat::mlx) return lines;
  MlxTypes mlx = mlx_types(folder, types.module_of("embed.weight").recipe.compute);
  mlx.as_forward = inputs.empty() && export_deviations(folder).empty();
  lines.push_back(mlx_rounding(mlx));
  if (std::string need = mlx_inputs_need(folder); !need.empty()) lines.push_back(std::move(need));
  return lines;
}

ExportSource::ExportSource(const fs::path& from, std::unique_ptr<Backend> device, const std::vector<std::string>& values)
    : precision(values) {
  const ModelUse use{.precision = precision};
  if (is_published_model(from)) {
    auto opened = std::make_unique<HfWeights>(from);
    RunConfig config = as_used(opened->run_config(), true, use);
    if (!precision.empty()) config = for_ranks(std::move(config), {});
    model = SavedModel{.config = config, .plan = resolve_plan(config)};
    files = tokenizer_files(*opened);
    findings = opened->server_findings();
    folder = opened.get();
    reader = std::move(opened);
  } else {
    CheckpointReader& opened = checkpoint.emplace(open_checkpoint(from));
    model = saved_model(opened);
    if (!precision.empty()) {
      model->config = for_ranks(as_used(std::move(model->config), false, use), {});
      model->plan = resolve_plan(model->config);
    }
    files = tokenizer_files(opened);
    tokenizer = saved_tokenizer(opened);
    reader = std::make_unique<CheckpointWeights>(opened);
  }
  weights.emplace(*reader, model->plan, std::move(device), precision.empty());
}

ExportFiles ExportSource::files_beside() const { return export_files(model->config.data, files, tokenizer); }

std::optional<ProvenCheckpoint> ExportSource::proven() const {
  if (!checkpoint) return {};
  return ProvenCheckpoint{.step = checkpoint->manifest().step, .manifest = checkpoint->hash()};
}

struct ModelExport::Source : ExportSource {
  Source(const fs::path& from, const ExportOptions& how, std::unique_ptr<Backend> device, const std::vector<std::string>& values)
      : ExportSource(from, std::move(device), values), options(how) {}

  // Made on first use, because making it refuses a model that no architecture expresses, which can still be compared.
  const ExportedWeights& exported() {
    if (!made) made.emplace(*weights, model->config.model, options, folder);
    return *made;
  }

  ExportOptions options;
  std::optional<ExportedWeights> made;
};

ModelExport::ModelExport(const fs::path& from, const ExportOptions& options, std::unique_ptr<Backend> device,
                         const std::vector<std::string>& precision)
    : source_(std::make_unique<Source>(from, options, std::move(device), precision)) {}
ModelExport::~ModelExport() = default;

const ModelConfig& ModelExport::model() const { return source_->model->config.model; }
ForwardWeights& ModelExport::weights() { return *source_->weights; }

const std::string& ModelExport::manifest() const {
  static const std::string kNone;
  return source_->checkpoint ? source_->checkpoint->hash() : kNone;
}

std::vector<std::string> ModelExport::warnings() const {
  std::vector<std::string> warnings = source_->findings;
  std::ranges::move(export_warnings(model(), source_->options.format, own_tokenizer(source_->files, source_->tokenizer)),
                    std::back_inserter(warnings));
  if (std::string rounded = simulated_weights(); !rounded.empty()) warnings.push_back(std::move(rounded));
  std::ranges::copy(source_->exported().deviations(), std::back_inserter(warnings));
  return warnings;
}

std::string ModelExport::simulated_weights() const { return mantissa::simulated_weights(source_->model->plan); }

ExportedModel ModelExport::summary() const {
  const SafetensorsLayout& layout = source_->exported().layout();
  ExportedModel out{.architecture = source_->exported().architecture(),
                    .tensors = std::ssize(layout.tensors()),
                    .bytes = layout.bytes(),
                    .simulated = !simulated_weights().empty()};
  if (source_->checkpoint) out.step = source_->checkpoint->manifest().step;
  out.chat_template = export_files(source_->model->config.data, source_->files, source_->tokenizer).chat_template;
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
    source_->exported().write(i, weights(), [&](std::span<const std::byte> bytes) {
      hash.update(bytes);
      writer.write(bytes);
      if (progressed) progressed();
    });
    hashes.push_back(hash.finish());
  }
  writer.finish();
  for (size_t i = first; i < last; ++i) {
    const SafetensorsLayout::Place& place = layout.place(i);
    const File file = File::open(folder / layout.file(place.file));
    const Hash64 hash = xxh64(place.end - place.begin, [&](int64_t at, std::span<std::byte> piece) {
      file.read_at(place.begin + at, piece);
      if (progressed) progressed();
    });
    require(hash == hashes[i - first], ExitCode::storage, folder.string(), ": ", layout.tensors()[i].name, " is not what was written");
  }
  return hashes;
}

void ModelExport::finish(const fs::path& folder, const std::vector<Hash64>& hashes) const {
  const ExportedWeights& exported = source_->exported();
  require(hashes.size() == exported.layout().tensors().size(), ExitCode::internal, folder.string(), ": ", hashes.size(), " hashes of ",
          exported.layout().tensors().size(), " tensors");
  ExportFiles beside = export_files(source_->model->config.data, source_->files, source_->tokenizer);
  std::vector<TokenizerFile>& files = beside.files;
  const std::string quantization = exported.quantization();
  const auto is_narrow_matrix = [](const SafetensorsTensor& file) { return file.shape.size() > 1 && file.dtype != FileDtype::f32; };
  const Dtype dtype = std::ranges::any_of(exported.layout().tensors(), is_narrow_matrix) ? Dtype::bf16 : Dtype::f32;
  files.push_back({.name = "config.json", .bytes = architecture_config(model(), dtype, beside.special, quantization, beside.router_loss)});
  if (source_->options.weights == ExportWeights::packed && source_->options.convention == Convention::modelopt)
    files.push_back({.name = kModeloptSideFile, .bytes = modelopt_side_file(exported.modules())});
  if (!exported.deviations().empty())
    files.push_back({.name = "README.md",
                     .bytes = text("mlx-lm computes this model otherwise than it was trained, or cannot load it:\n\n- ",
                                   joined(exported.deviations(), "\n- "), "\n")});
  for (const TokenizerFile& file : files) write_new_file(folder / file.name, file.bytes);
  std::vector<ProvenTensor> tensors;
  for (size_t i = 0; i < hashes.size(); ++i) {
    tensors.push_back(exported.description(i));
    tensors.back().xxh64 = hashes[i].text();
  }
  const bool hf = source_->options.format == ExportFormat::hf;
  const bool has_convention = hf && !quantization.empty() && exported.architecture() != Architecture::gpt_oss;
  write_export_proof(folder, source_->proven(), source_->options, source_->precision, has_convention, files, tensors,
                     exported.deviations());
}

std::optional<std::string> ModelExport::difference(HfWeights& written, int part, int parts, const Progressed& progressed) {
  std::optional<std::string> difference = export_difference(written, weights(), part, parts, progressed);
  if (!difference && part == 0 && source_->exported().deviations().empty()) {
    const std::vector<std::string> schemes = export_scheme_differences(written, weights());
    if (!schemes.empty()) difference = schemes.front();
  }
  weights().require_unchanged();
  if (!difference) return {};
  return text("what was written is not what was to be: ", *difference);
}

std::optional<std::string> ModelExport::tokenizer_difference(HfWeights& folder) const {
  constexpr const char* kName = "tokenizer.json";
  const ExportFiles expected = export_files(source_->model->config.data, source_->files, source_->tokenizer);
  const auto own = std::ranges::find(expected.files, kName, &TokenizerFile::name);
  const std::optional<std::string> found = folder.file(kName);
  if (own == expected.files.end() || !found) return {};
  return mantissa::tokenizer_difference(*found, own->bytes, (fs::path(folder.where()) / kName).string());
}

ExportedModel export_model(const fs::path& from, const fs::path& output, const ExportOptions& options, std::unique_ptr<Backend> device,
                           const std::vector<std::string>& precision) {
  ModelExport model(from, options, std::move(device), precision);
  ExportedModel summary = model.summary();  // throws what model and options refuse; values are refused while they are written
  PendingFolder pending(output);
  model.begin(pending.path());
  model.finish(pending.path(), model.write(pending.path(), 0, 1));
  HfWeights written(pending.path());
  const std::optional<std::string> difference = model.difference(written, 0, 1);
  require(!difference, ExitCode::storage, output.string(), ": ", difference.value_or(""));
  summary.lines = server_lines(written, model.weights());
  pending.publish();
  for (const std::string& warning : model.warnings()) log_warning(warning);
  for (const std::string& finding : written.ignore_list_findings()) log_warning(finding);
  if (std::optional<std::string> rounding = written.vllm_rounding()) log_warning(*rounding);
  return summary;
}

void check_export(const RunConfig& config, ConfigReport& report) {
  for (const char* const key : {"model", "precision", "checkpoint.export"})
    if (report.failed(key)) return;
  if (!config.checkpoint.exported) return;
  ModelConfig model = config.model;
  // Where only the data can tell the vocabulary, any size shows the same: here one without padding.
  if (!model.vocab_size) model.vocab_size = std::lcm(model.pad_vocab_to, int64_t{128});
  ConfigReport refused;
  const PrecisionPlan plan = PrecisionPlan::resolve(config.precision, model_shape(model), refused);
  if (!refused.ok()) return;
  try {
    const ForwardWeights types(plan);
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
  const ForwardWeights types(plan);
  return ExportedWeights(types, model, options).layout().bytes();
}

std::vector<std::string> export_warnings(const ModelConfig& model, ExportFormat format, const std::optional<Tokenizer>& tokenizer) {
  std::vector<std::string> warnings;
  if (model.moe && model.moe->capacity_factor)
    warnings.emplace_back(
        "model.moe.capacity_factor: training drops assignments beyond the capacity of an expert, but servers and eval drop none");
  if (format != ExportFormat::hf) return warnings;  // one program reads it, whose differences are listed by key
  if (model.moe && !model.moe->dense_layers.empty())
    warnings.emplace_back(
        "model.moe.dense_layers: layers without experts among others are read by transformers, vLLM and mlx-lm only, not by llama.cpp");
  if (const auto& rope = model.rope_scaling; rope && rope->type == RopeScaling::yarn) {
    const double known = rope->factor * static_cast<double>(rope->original_max_position_embeddings);
    if (known < static_cast<double>(model.max_position_embeddings))
      warnings.push_back(
          text("model.rope_scaling: vLLM has rotations for factor times original_max_position_embeddings, ", static_cast<int64_t>(known),
               " positions, and reads behind them at those up to model.max_position_embeddings ", model.max_position_embeddings));
  }
  if (tokenizer)
    warnings.emplace_back(
        "tokenizer.json: llama.cpp knows tokenizers by their pieces of a certain text, and refuses this one, which has no merges");
  return warnings;
}

std::vector<std::string> export_scheme_differences(const HfWeights& folder, const ForwardWeights& types) {
  std::vector<std::string> differences;
  for (const auto& [module, here] : folder.packed_modules()) {
    const Format there = types.input_format(module + ".weight");
    const auto how = [](Format format) { return format == Format::none ? "in high precision" : "quantized"; };
    if ((there == Format::none) != (here.inputs == Format::none))
      differences.push_back(text(module, ": inputs are ", how(there), " in the checkpoint, ", how(here.inputs), " here"));
    const Quantization& input = types.module_of(module + ".weight").recipe.input;
    if (there == Format::none || here.inputs == Format::none) continue;
    if (there != here.inputs)
      differences.push_back(
          text(module, ": inputs are ", input, " in the checkpoint, and servers quantize them to ", format_name(here.inputs), " here"));
    else if (!as_servers_quantize(input, here.format, here.block))
      differences.push_back(text(module, ": inputs are ", input, " in the checkpoint, and servers quantize them by ",
                                 there == Format::nvfp4  ? "nearest"
                                 : there == Format::e2m1 ? "flashinfer"
                                                         : "rceil with any scale"));
    else if (there == Format::nvfp4 && here.input_exponent != input.tensor_exponent)
      differences.push_back(text(module, ": inputs are ", input, " in the checkpoint, and servers quantize them under a scale of ",
                                 here.input_exponent ? text("2^", int{*here.input_exponent}) : "no power of two", " here"));
    else if ((here.block == kTile || there == Format::e2m1) && input.block_cols != here.block)
      differences.push_back(
          text(module, ": inputs are ", input, " in the checkpoint, and servers quantize them in blocks of ", here.block, " here"));
  }
  return differences;
}

CodeComparison compare_codes(HfWeights& folder, ForwardWeights& weights) {
  CodeComparison out;
  std::vector<std::byte> codes, scales;
  for (const ArchitectureTensor& tensor : folder.tensors()) {
    const WeightForm form = folder.form(tensor.parameter);
    const Quantization how = weights.quantized(tensor.parameter);
    if (!form.codes || form.codes.tiles() || form.codes.format != how.format || form.codes.tensor_exponent != how.tensor_exponent) continue;
    ++out.tensors;
    for_chunks(tensor, [&](const RowRun& run, int64_t begin, int64_t end) {
      if (out.difference) return;
      codes.resize(static_cast<size_t>((end - begin) * code_bytes(form)));
      scales.resize(static_cast<size_t>((end - begin) * scale_bytes(form)));
      folder.read_codes(tensor.parameter, begin, end, codes, scales);
      const auto first_other = [&](const std::vector<std::byte>& here, const std::vector<std::byte>& there, int64_t row_bytes) {
        const auto at = std::ranges::mismatch(here, there).in1 - here.begin();
        if (out.difference || at == std::ssize(here)) return;
        const int64_t row = run.file_row + (begin - run.row + at / row_bytes) * run.step,
                      column = at % row_bytes * form.columns / row_bytes;
        out.difference = element_name(tensor, row, column);
      };
      first_other(scales, weights.scales(tensor.parameter, begin, end), scale_bytes(form));
      first_other(codes, weights.codes(tensor.parameter, begin, end), code_bytes(form));
    });
  }
  return out;
}

// If forward rounds a weight when it reads it (ForwardWeights::rounds()), a tensor of bf16 is compared with the rounded values.
std::optional<std::string> export_difference(HfWeights& folder, ForwardWeights& weights, int part, int parts,
                                             const Progressed& progressed) {
  int64_t all = 0, before = 0;
  for (const ArchitectureTensor& tensor : folder.tensors()) all += tensor.rows() * tensor.columns();
  std::optional<std::string> found;
  std::vector<float> there, here;
  for (const ArchitectureTensor& tensor : folder.tensors()) {
    const int64_t columns = tensor.columns(), elements = tensor.rows() * columns, middle = before + elements / 2;
    before += elements;
    if (middle * parts / all != part) continue;
    const bool narrow = folder.file_dtype(tensor) == Dtype::bf16 && weights.rounds(tensor.parameter);
    const bool zeros_alike = weights.quantized(tensor.parameter).rule == ScaleRule::flashinfer;
    for_chunks(tensor, [&](const RowRun& run, int64_t begin, int64_t end) {
      if (found) return;
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
        if (std::bit_cast<uint32_t>(there[i]) == std::bit_cast<uint32_t>(here[i])) continue;
        if (zeros_alike && there[i] == 0.0F && here[i] == 0.0F) continue;
        found = text(element(i), " is ", there[i], ", forward multiplies by ", here[i]);
      }
    });
    if (found) return found;
  }
  return {};
}

}  // namespace mantissa
