#include "hf/load_model.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_search.h"
#include "checkpoint/saved_model.h"
#include "hf/export_files.h"
#include "hf/tile_scales.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "mantissa/formats/nvfp4.h"
#include "mantissa/tensor/tensor.h"
#include "models/model_shape.h"

namespace mantissa {
namespace {

// Makes the configuration of a run that has the weights of a folder.

constexpr int64_t kUsualLength = 1024;
constexpr std::string_view kLayers = "layers.";
constexpr const char *kEmbedding = "embed", *kOutput = "output";
constexpr const char* kOutputRecipe = "packed_output";

// Tables of tokens have the recipes of linears only where these round the weight alone.
std::string recipe_name(const PackedScheme& scheme, bool table = false) {
  const bool two_levels = scheme.format == Format::nvfp4;
  return text("packed_", format_name(scheme.format), two_levels ? std::to_string(scheme.exponent) : "",
              table && scheme.format == Format::e4m3 ? "_table" : "",
              scheme.inputs == Format::none   ? ""
              : scheme.inputs == Format::e2m1 ? "_e2m1_inputs"
                                              : "_inputs",
              scheme.input_exponent ? std::to_string(*scheme.input_exponent) : "", scheme.block == kTile ? "_128" : "");
}

QuantizationConfig blocks_of(const Quantization& how) {
  return {.format = how.format, .block = {how.block_rows, how.block_cols}, .rule = how.rule, .tensor_exponent = how.tensor_exponent};
}

// Returns a recipe whose weight is the codes of the file, or their values where there is no GEMM of such codes, and of a table; its input
// is quantized as by the server.
RecipeConfig recipe_of(const PackedScheme& scheme, Dtype dtype, bool table) {
  RecipeConfig recipe{.base = "high", .compute = dtype, .weight = {}, .input = {}, .output_grad = {}, .weight_fake_quant = {}, .gemms = {}};
  const bool multiplied = scheme.format == Format::e4m3 && !table;
  (multiplied ? recipe.weight : recipe.weight_fake_quant) = blocks_of(form_of(scheme));
  // Values of NVFP4 are quantized again. By nearest they could become others; the scales that mse tries hold that of the file, whichever of
  // both rules chose it, and there the values have no error.
  if (scheme.format == Format::nvfp4) recipe.weight_fake_quant->rule = ScaleRule::mse;
  const bool inputs = scheme.inputs != Format::none;
  const ScaleRule rule = scheme.inputs == Format::e2m1    ? ScaleRule::flashinfer
                         : scheme.inputs == Format::nvfp4 ? ScaleRule::nearest
                                                          : ScaleRule::rceil;
  if (inputs)
    recipe.input = blocks_of({.format = scheme.inputs,
                              .block_rows = 1,
                              .block_cols = scheme.block,
                              .rule = rule,
                              .tensor_exponent = scheme.input_exponent.value_or(int8_t{0})});
  if (multiplied) recipe.gemms = {GemmRole::fprop, GemmRole::dgrad};
  if (!multiplied && inputs) recipe.gemms = {GemmRole::fprop};
  return recipe;
}

std::string scheme_text(const std::optional<PackedScheme>& scheme) {
  if (!scheme) return "not quantized";
  return text(format_name(scheme->format),
              scheme->inputs == Format::none ? std::string(" with inputs in high precision")
              : is_four_bit(scheme->inputs)  ? text(" with inputs in ", format_name(scheme->inputs))
                                             : " with quantized inputs",
              scheme->block == kTile ? " in blocks of 128" : "");
}

// An output projection is computed with as codes only if its inputs are, too, in blocks of 32, and a router never; nor is what multiplies
// inputs of NVFP4 under a scale that is no power of two.
bool computes_with(const ModuleShape& module, const PackedScheme& scheme) {
  if (scheme.inputs == Format::nvfp4 && !scheme.input_exponent) return false;
  if (module.path == kOutput) return scheme.format == Format::e4m3 && scheme.inputs == Format::e4m3 && scheme.block == kPackedBlock;
  return module.kind == ModuleKind::linear || module.is_token_table();
}

// Returns one rule for all layers whose module has this scheme, or is a linear of none where the ambient recipe is not high.
std::vector<RuleConfig> rules_of(const std::map<std::string, PackedScheme>& packed, const std::vector<ModuleShape>& modules) {
  const bool ambient = packed.contains(kOutput);
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> layers;
  std::map<std::string, size_t> all;
  for (const ModuleShape& module : modules) {
    if (!module.path.starts_with(kLayers)) continue;
    const size_t begin = kLayers.size(), dot = module.path.find('.', begin);
    const std::string layer = module.path.substr(begin, dot - begin), rest = module.path.substr(dot + 1);  // "3" and "mlp.down"
    ++all[rest];
    const auto found = packed.find(module.path);
    if (found != packed.end()) {
      layers[{rest, recipe_name(found->second)}].push_back(layer);
    } else if (ambient && module.kind == ModuleKind::linear) {
      layers[{rest, "high"}].push_back(layer);
    }
  }
  std::vector<RuleConfig> rules;
  if (const auto table = packed.find(kEmbedding); table != packed.end())
    rules.push_back({.match = kEmbedding, .recipe = recipe_name(table->second, true)});
  for (const auto& [key, list] : layers) {
    const std::string which = list.size() == all[key.first] ? "*" : list.size() == 1 ? list[0] : "{" + joined(list, ",") + "}";
    rules.push_back({.match = text(kLayers, which, ".", key.first), .recipe = key.second});
  }
  return rules;
}

}  // namespace

// Returns the quantization_config, which must be there if there are codes: these alone do not say how a server quantizes their inputs.
std::optional<PackedConfig> HfWeights::packed_config() const {
  if (!config_.quantization.empty()) return PackedConfig(config_.quantization, files_->config_source());
  for (const auto& [parameter, pieces] : pieces_) {
    const auto codes = std::ranges::find_if(pieces, [](const Piece& piece) { return piece.scales != nullptr; });
    if (codes == pieces.end()) continue;
    const std::optional<std::string> side = files_->file(kModeloptSideFile);
    if (side) return PackedConfig::of_modelopt(*side, (folder_ / kModeloptSideFile).string());
    fail(ExitCode::usage, where(), ": ", codes->entry->name, " is ", codes->entry->dtype, " with scales, but there is ",
         format_ == ExportFormat::mlx ? "no quantization in config.json"
                                      : text("neither a quantization_config in config.json nor a ", kModeloptSideFile),
         ", which would say for which modules inputs are quantized: add the one that belongs to these weights");
  }
  return {};
}

// Throws unless the file and its quantization_config agree about all parts of one weight. Programs that read embeddings as codes never
// quantize what these multiply as an output projection.
std::map<std::string, PackedScheme> HfWeights::packed_modules() const {
  const std::optional<PackedConfig> found = packed_config();
  if (!found) return {};
  const PackedConfig& config = *found;
  std::map<std::string, PackedScheme> packed;
  for (const ModuleShape& module : model_shape(config_.model).modules) {
    const bool linear = module.kind == ModuleKind::linear, table = module.is_token_table() && format_ != ExportFormat::hf;
    const bool other = module.path == kOutput || module.kind == ModuleKind::router || table;
    if (!linear && !other) continue;
    const std::vector<Piece>& pieces = pieces_of(module.path + ".weight");
    const Piece& first = pieces.front();
    const bool conv = first.tensor->transposed && !first.scales;  // no Linear, and never codes
    if (conv || (!first.scales && (other || !config.names_modules()))) continue;
    const auto name_of = [](const Piece& piece) { return piece.tensor->name.substr(0, piece.tensor->name.rfind('.')); };
    std::optional<PackedScheme> scheme = config.scheme(name_of(first));
    for (const Piece& piece : pieces) {
      const std::string name = name_of(piece);
      const std::optional<PackedScheme> said = config.scheme(name);
      require(said == scheme, ExitCode::usage, config.where(), ": ", name_of(first), " is ", scheme_text(scheme), " and ", name, " is ",
              scheme_text(said), ", but both are parts of ", piece.tensor->parameter, ", which must have one scheme");
      require(said ? said->format == piece.format() : !piece.scales, ExitCode::usage, config.where(), ": ", name, " is ", scheme_text(said),
              ", but ", piece.entry->name, " is ", piece.entry->dtype, piece.scales ? " with scales" : " without scales");
    }
    if (scheme && table) scheme->inputs = Format::none;
    if (scheme && first.tensor_scale) scheme->exponent = form(module.path + ".weight").codes.tensor_exponent;
    if (scheme && scheme->inputs == Format::nvfp4) {
      const auto lacks = std::ranges::find_if(pieces, [](const Piece& piece) { return piece.tensor_scale && !piece.input_scale; });
      require(lacks == pieces.end(), ExitCode::data, where(), ": lacks ", lacks == pieces.end() ? "" : name_of(*lacks),
              ".input_global_scale, or .input_scale, of the inputs that ", config.where(), " says are quantized");
      scheme->input_exponent = format_ == ExportFormat::mlx ? std::optional(int8_t{0}) : common_exponent(pieces, &Piece::input_scale);
    }
    if (scheme) packed[module.path] = *scheme;
  }
  return packed;
}

std::vector<std::string> HfWeights::ignore_list_findings() const {
  const std::optional<PackedConfig> config = packed_config();
  if (!config) return {};
  std::set<std::string> linears;  // parameters
  for (const ModuleShape& module : model_shape(config_.model).modules)
    if (module.kind == ModuleKind::linear || module.path == kOutput) linears.insert(module.path + ".weight");
  std::vector<FileLinear> held;
  std::vector<std::string> modules = {"lm_head"};  // a server has it, also where it is the embedding
  for (const auto& [parameter, pieces] : pieces_) {
    for (const Piece& piece : pieces) {
      modules.push_back(piece.tensor->name.substr(0, piece.tensor->name.rfind('.')));
      if (linears.contains(parameter)) held.push_back({.name = modules.back(), .codes = piece.scales != nullptr});
    }
  }
  std::vector<std::string> findings;
  for (const IgnoreList& list : config->ignored())
    std::ranges::move(mantissa::ignore_list_findings(list, held, modules), std::back_inserter(findings));
  return findings;
}

// compressed-tensors alone has codes of 4 bits in linears that are no routed experts, whose kernels are others.
std::optional<std::string> HfWeights::vllm_rounding() const {
  if (format_ != ExportFormat::hf) return {};
  const std::map<std::string, PackedScheme> packed = packed_modules();
  const auto linears = std::ranges::count_if(packed, [](const auto& module) {
    return module.second.format == Format::e2m1 && module.second.inputs == Format::none && !is_routed_expert(module.first);
  });
  if (linears == 0) return {};
  return text("vLLM up to 0.32 rounds inputs of ", count_text(linears, "MXFP4 module"),
              " to 4 bits on SM100, as forward here does not (vllm-project/vllm#56770): serve with --linear-backend marlin, or set "
              "VLLM_DISABLED_KERNELS=FlashInferMxFp4LinearKernel");
}

// Returns the modules whose recipes compute with codes; the rest is read as values.
std::map<std::string, PackedScheme> HfWeights::computed_modules() const {
  std::map<std::string, PackedScheme> packed = packed_modules();
  for (const ModuleShape& module : model_shape(config_.model).modules) {
    const auto found = packed.find(module.path);
    if (found == packed.end()) continue;
    const bool codes = static_cast<bool>(form(module.path + ".weight").codes);
    if (!codes || !computes_with(module, found->second)) packed.erase(found);
  }
  return packed;
}

std::vector<std::string> HfWeights::weights_as_values() const {
  const std::vector<ModuleShape> modules = model_shape(config_.model).modules;
  std::vector<std::string> numbers, products, boundaries, others, findings;
  for (const auto& [path, scheme] : packed_modules()) {
    const auto module = std::ranges::find(modules, path, &ModuleShape::path);
    if (scheme.block == kTile && form(path + ".weight").codes && !computes_with(*module, scheme)) others.push_back(path);
  }
  for (const auto& [parameter, pieces] : pieces_) {
    if (const std::optional<TensorScale>& scale = pieces.front().tensor_scale; scale && form(parameter).products)
      products.push_back(text(scale->name, " is ", scale->value));
    const auto number = std::ranges::find_if(pieces, [](const Piece& piece) { return piece.tiles && piece.tiles->no_power_of_two; });
    if (number != pieces.end())
      numbers.push_back(*number->tiles->no_power_of_two);
    else if (const Piece* const boundary = pieces.front().tiles ? ends_within_tile(pieces) : nullptr)
      boundaries.push_back(text(boundary->entry->name, " in ", parameter));
  }
  if (!numbers.empty())
    findings.push_back(text(where(), ": ", count_text(numbers.size(), "weight"), " with scales that are not powers of two (first: ",
                            numbers.front(), "): read as values; a recipe such as fp8_block quantizes them again"));
  if (!products.empty())
    findings.push_back(text(where(), ": ", count_text(products.size(), "weight"),
                            " of NVFP4 whose scale of the tensor is no power of two, or another in a part of what servers fuse (first: ",
                            products.front(), "): read as values; a recipe such as nvfp4_qat quantizes them again"));
  if (std::optional<std::string> inverted = inverted_scales()) findings.push_back(std::move(*inverted));
  if (!others.empty())
    findings.push_back(
        text(where(), ": ", joined(others), ": read as values, because output projections and routers have no block FP8 here"));
  if (!boundaries.empty())
    findings.push_back(text(where(), ": ", count_text(boundaries.size(), "weight"),
                            " whose tiles of 128x128 are not tiles of the parameter that they are a part of (first: ", boundaries.front(),
                            "): read as values"));
  return findings;
}

std::vector<std::string> HfWeights::server_findings() const {
  std::vector<std::string> findings = weights_as_values();
  const std::map<std::string, PackedScheme> packed = packed_modules(), computed = computed_modules();
  for (const int64_t block : {kTile, kNvfp4Block}) {
    std::vector<std::string> high;
    for (const auto& [path, scheme] : packed) {
      const auto found = computed.find(path);
      if (scheme.block != block || scheme.inputs == Format::none) continue;
      if (found == computed.end() || found->second.inputs == Format::none) high.push_back(path);
    }
    if (!high.empty())
      findings.push_back(text(where(), ": ", count_text(high.size(), "weight"), " whose inputs servers quantize in blocks of ", block,
                              ", but which are values here (first: ", high.front(), "): their inputs are not quantized here"));
  }
  if (!block_fp8_) return findings;
  const bool any = std::ranges::any_of(computed, [](const auto& module) { return module.second.inputs != Format::none; });
  if (any && !packed_config()->scales_of_inputs_are_powers())
    findings.push_back(
        text(where(),
             ": quantization_config.scale_fmt is not ue8m0, so servers scale inputs by arbitrary numbers, but mantissa by powers of two"));
  return findings;
}

RunConfig HfWeights::run_config() const {
  RunConfig config;
  config.model = config_.model;
  config.model.num_key_value_heads = config.model.kv_heads();
  config.model.head_dim = config.model.head_size();
  config.precision.dtype = config_.dtype;
  config.training.seq_len = std::min(kUsualLength, config_.model.max_position_embeddings);
  const std::map<std::string, PackedScheme> packed = computed_modules();
  for (const auto& [module, scheme] : packed) {
    const bool table = module == kEmbedding;
    RecipeConfig recipe = recipe_of(scheme, config_.dtype, table);
    if (module != kOutput) {
      config.precision.recipes[recipe_name(scheme, table)] = recipe;
      continue;
    }
    recipe.output_grad = recipe.input;  // as every ambient recipe of a quantized output projection has it
    config.precision.recipes[kOutputRecipe] = recipe;
    config.precision.recipe = kOutputRecipe;
    config.precision.fp8_output_proj = {.enabled = true, .fprop = true, .dgrad = true, .wgrad = false};
    config.model.pad_vocab_to = kPackedBlock;
  }
  config.precision.rules = rules_of(packed, model_shape(config_.model).modules);
  return config;
}

namespace {

namespace fs = std::filesystem;

// Returns none for a tokenizer that is not supported: ids can be read and written all the same.
std::optional<Tokenizer> usable_tokenizer(const std::vector<TokenizerFile>& files, const std::string& source) {
  try {
    return tokenizer_of(files, source);
  } catch (const Error& error) {
    log_warning(error.what());
    return std::nullopt;
  }
}

// End tokens are those that the files name, which are read when somebody generates: nothing else needs the files to be right; and those
// that the data taught. Without named ones they are all that the model learned.
void take_files(std::vector<TokenizerFile> files, LoadedModel& loaded) {
  std::erase_if(files,
                [](const TokenizerFile& file) { return !file.name.ends_with("config.json") && !file.name.starts_with("chat_template"); });
  loaded.files = std::move(files);
  std::vector<int32_t> learned = learned_end_tokens(loaded.config.data, loaded.tokenizer);
  std::erase_if(learned, [size = *loaded.config.model.vocab_size](int32_t id) { return id >= size; });
  std::vector<int32_t> taught = taught_end_tokens(loaded.config.data, loaded.tokenizer);
  loaded.end_tokens = [files = loaded.files, size = *loaded.config.model.vocab_size, learned = std::move(learned),
                       taught = std::move(taught)] {
    std::vector<int32_t> named;
    for (const char* const name : {"generation_config.json", "config.json"}) {
      const auto file = std::ranges::find(files, name, &TokenizerFile::name);
      if (file == files.end() || !named.empty()) continue;
      for (const int64_t id : read_special_tokens(file->bytes, name).end)
        if (id >= 0 && id < size) named.push_back(static_cast<int32_t>(id));
    }
    if (named.empty()) return learned;
    for (const int32_t id : taught)
      if (std::ranges::find(named, id) == named.end()) named.push_back(id);
    return named;
  };
}

// Sets the type of computation, also in the recipes that stand for the files of a folder, which name it.
void compute_in(Dtype dtype, PrecisionConfig& precision) {
  for (auto& [name, recipe] : precision.recipes) {
    if (recipe.compute == precision.dtype) recipe.compute = dtype;
  }
  precision.dtype = dtype;
}

// Resolves the plan of a folder on these ranks. Blocks of codes belong to one rank, so the ranks may not divide what they divide as
// numbers.
PrecisionPlan plan_of_folder(const RunConfig& folder, const RunConfig& used, const ModelRanks& ranks, const ModelUse& use) {
  constexpr const char* kAsNumbers = "precision.recipe=high";
  try {
    return resolve_plan(used);
  } catch (const Error& error) {
    if (!use.precision.empty() || ranks.tensor == 1) throw;
    const RunConfig numbers = for_ranks(as_used(folder, true, {.dtype = use.dtype, .precision = {kAsNumbers}}), ranks);
    ConfigReport report;
    PrecisionPlan::resolve(numbers.precision, model_shape(numbers.model, ranks.tensor), report);
    if (!report.ok()) throw;
    fail(error.code(), error.what(), "\n--set ", kAsNumbers, " reads the codes of the folder as numbers, which these ranks can divide");
  }
}

// Loads the model of a folder of Hugging Face's form.
LoadedModel load_hf_folder(const fs::path& folder, std::unique_ptr<Backend> device, const Mesh& mesh, const ModelUse& use) {
  LoadedModel loaded;
  loaded.path = folder;
  loaded.device = std::move(device);
  agree_on_reading(mesh.tensor, [&] {
    HfWeights weights(folder);
    if (mesh.tensor.rank() == 0) {
      for (const std::string& finding : weights.server_findings()) log_warning(finding);
    }
    const RunConfig folder_config = weights.run_config();
    loaded.config = for_ranks(as_used(folder_config, true, use), mesh.ranks());
    const PrecisionPlan plan = plan_of_folder(folder_config, loaded.config, mesh.ranks(), use);
    std::vector<TokenizerFile> files;
    for (const char* const name : {"generation_config.json", "config.json", "tokenizer.json", "tokenizer_config.json",
                                   "chat_template.jinja", "chat_template.json"}) {
      if (std::optional<std::string> content = weights.file(name)) files.push_back({.name = name, .bytes = std::move(*content)});
    }
    loaded.tokenizer = usable_tokenizer(files, weights.where());
    take_files(std::move(files), loaded);
    loaded.model = std::make_unique<Gpt>(loaded.config.model, *loaded.device, plan, GptOptions{.gradients = false, .mesh = mesh});
    load_hf_weights(weights, loaded.model->parameters());
  });
  return loaded;
}

// Names an element that is NaN or Inf as the folder does; `bad` names it as the model does, or one that only its dtype here cannot hold.
[[noreturn]] void refuse_nonfinite(HfWeights& weights, const ParameterShard& shard, const std::string& bad) {
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    const Box box = box_of(shard, chunk);
    std::vector<float> values(static_cast<size_t>(box.elements()));
    weights.read_fp32(shard.of->name, box, values);
    const int64_t at = first_nonfinite(Dtype::f32, std::as_bytes(std::span(values))), columns = box.elements() / box.size.front();
    if (at < 0) continue;
    const int64_t first_column = box.start.size() > 1 ? box.start.back() : 0;
    fail(ExitCode::data, weights.where(), ": ",
         weights.element(shard.of->name, box.start.front() + at / columns, first_column + at % columns), " is NaN or Inf");
  }
  fail(ExitCode::data, weights.where(), ": ", bad, ": weights must be finite");
}

// Makes the model of a checkpoint, without its weights; returns its plan.
PrecisionPlan make_model(CheckpointReader& reader, const Mesh& mesh, const ModelUse& use, LoadedModel& loaded) {
  const RunConfig& saved = reader.config();
  loaded.config = for_ranks(as_used(saved, false, use), mesh.ranks());
  PrecisionPlan plan = plan_for_tensors(saved, reader, loaded.config);
  const std::vector<TokenizerFile> files = tokenizer_files(reader);
  loaded.tokenizer = saved_tokenizer(reader);
  if (!loaded.tokenizer) loaded.tokenizer = usable_tokenizer(files, reader.directory().string());
  take_files(files, loaded);
  loaded.model.reset();  // frees the model of a candidate that was given up
  loaded.model = std::make_unique<Gpt>(loaded.config.model, *loaded.device, plan, GptOptions{.gradients = false, .mesh = mesh});
  return plan;
}

}  // namespace

RunConfig as_used(RunConfig config, bool of_folder, const ModelUse& use) {
  if (!use.precision.empty()) {
    if (of_folder) {
      const Dtype dtype = config.precision.dtype;
      config.precision = {};
      config.precision.dtype = dtype;
    }
    config = with_precision(std::move(config), use.precision);
  }
  if (use.dtype) compute_in(*use.dtype, config.precision);
  return config;
}

void require_weights_fit(const HfWeights& weights, const ModelConfig& model) {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const ParameterShape& parameter : parameter_shapes(model_shape(weights.config().model)))
    shapes[parameter.name] = dimensions(parameter.shape);
  for (const ParameterShape& parameter : parameter_shapes(model_shape(model))) {
    const std::vector<int64_t> needed = dimensions(parameter.shape);
    const auto found = shapes.find(parameter.name);
    require(found != shapes.end(), ExitCode::usage, weights.where(), ": has no ", parameter.name, ", which the model needs");
    require(found->second == needed, ExitCode::usage, weights.where(), ": ", parameter.name, " is ", shape_text(found->second),
            ", but the model needs ", shape_text(needed));
  }
}

void load_hf_weights(HfWeights& weights, ParameterSet& parameters, const Optimizer* optimizer) {
  const auto load = [&](const ParameterShard& shard, const Tensor& master) {
    if (const std::string bad = read_shard(weights, shard, master); !bad.empty()) refuse_nonfinite(weights, shard, bad);
    parameters.store(shard, master);
  };
  if (optimizer) {
    for (const Optimizer::State& state : optimizer->states()) {
      for (const ParameterShard& chunk : chunks_of(state.shard))
        load(chunk, state.master.slice(chunk.begin - state.shard.begin, chunk.end - state.shard.begin));
    }
  } else {
    for (const ParameterShard& shard : chunks_of(parameters)) load(shard, parameters.room_for_master(shard));
  }
  weights.require_unchanged();
}

bool starts_from_folder(const Communicator& ranks, const fs::path& path) {
  // Rank 0 decides, so that all ranks read alike, or fail together.
  bool here = false;
  agree(ranks, [&] { here = is_published_model(path); });
  return ranks.all(static_cast<uint8_t>(here)).front() != 0;
}

std::string chat_template_warning(const LoadedModel& loaded, ChatTemplate which, const std::optional<std::string>& date) {
  const std::optional<ChatTemplate>& trained = loaded.config.data.chat_template;
  if (trained && *trained != which)
    return text(loaded.path.string(), ": was trained with data.chat_template ", choice_name(*trained), ", not with ", choice_name(which));
  const std::string difference = trained ? "" : chat_template_difference(loaded.files, which, date);
  return difference.empty() ? "" : text(loaded.path.string(), ": ", difference);
}

RunConfig config_of_model(const fs::path& path) { return is_published_model(path) ? HfWeights(path).run_config() : config_saved_at(path); }

LoadedModel load_model(const fs::path& path, std::unique_ptr<Backend> device, const Mesh& mesh, const ModelUse& use) {
  if (starts_from_folder(mesh.tensor, path)) return load_hf_folder(path, std::move(device), mesh, use);
  LoadedModel loaded;
  loaded.device = std::move(device);
  const auto load = [&](CheckpointReader& reader) {
    std::optional<PrecisionPlan> plan;
    agree_on_reading(mesh.tensor, [&] { plan = make_model(reader, mesh, use, loaded); });
    load_weights(reader, *plan, LoadFor::use, loaded.model->parameters(), nullptr, mesh.tensor);
  };
  const LoadedCheckpoint from = load_checkpoint(path, load, RanksTogether(mesh.tensor));
  loaded.path = from.path;
  loaded.step = from.step;
  return loaded;
}

}  // namespace mantissa
