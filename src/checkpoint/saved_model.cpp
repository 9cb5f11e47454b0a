#include "checkpoint/saved_model.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <span>

#include "checkpoint/checkpoint_search.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "mantissa/precision/rules.h"
#include "models/model_shape.h"

namespace mantissa {
namespace {

// Gives models that compute alike the same options.
ModelConfig completed(const ModelConfig& given) {
  ModelConfig model = with_derived(given);
  if (!model.moe) return model;
  model.moe->softmax_after_topk = false;                             // norm_topk_prob says as much
  if (model.moe->dense_layers.empty()) model.intermediate_size = 1;  // no layer has an MLP
  return model;
}

// Returns true if a model has no parameter that the other lacks or has in another shape.
bool takes_weights_of(const ModelConfig& other, const ModelConfig& model) {
  std::map<std::string, std::vector<int64_t>> there;
  for (const ParameterShape& parameter : parameter_shapes(model_shape(other))) there[parameter.name] = dimensions(parameter.shape);
  return std::ranges::all_of(parameter_shapes(model_shape(model)), [&](const ParameterShape& parameter) {
    const auto found = there.find(parameter.name);
    return found != there.end() && found->second == dimensions(parameter.shape);
  });
}

std::vector<int64_t> windows(const ModelConfig& model) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < model.num_layers; ++i) out.push_back(model.window(i));
  return out;
}

}  // namespace

ModelConfig with_derived(ModelConfig model) {
  model.head_dim = model.head_size();
  model.num_key_value_heads = model.kv_heads();
  if (model.activation == Activation::swiglu_clamped) model.swiglu_limit = model.glu_limit();
  if (model.rope_scaling && model.rope_scaling->type == RopeScaling::llama3) {
    model.rope_scaling->low_freq_factor = model.rope_scaling->low_freq_factor.value_or(1.0);
    model.rope_scaling->high_freq_factor = model.rope_scaling->high_freq_factor.value_or(4.0);
  }
  if (model.rope_scaling && model.rope_scaling->type == RopeScaling::yarn) {
    model.rope_scaling->beta_fast = model.rope_scaling->beta_fast.value_or(32.0);
    model.rope_scaling->beta_slow = model.rope_scaling->beta_slow.value_or(1.0);
  }
  if (model.moe) model.moe->norm_topk_prob = model.moe->rule().softmax_after_topk || model.moe->rule().renormalize;
  return model;
}

std::vector<Difference> model_differences(const ModelConfig& saved, const ModelConfig& current) {
  const ModelConfig before = completed(saved), now = completed(current);
  std::vector<Difference> list = differences("model", before, now), experts = differences("model.moe", before.moe, now.moe);
  // Padding is not stored, and windows are compared by layer.
  std::erase_if(list, [](const Difference& one) { return one.key == "model.pad_vocab_to" || one.key == "model.sliding_window"; });
  std::ranges::move(differences("model.rope_scaling", before.rope_scaling, now.rope_scaling), std::back_inserter(list));
  // Coefficients of losses, the capacity and a forced balance are no part of the model; load_weights() judges the rate of expert biases.
  std::erase_if(experts, [](const Difference& one) {
    return one.key.ends_with("_coef") || one.key.ends_with(".bias_update_rate") || one.key.ends_with(".capacity_factor") ||
           one.key.ends_with(".force_balance");
  });
  std::ranges::move(experts, std::back_inserter(list));
  if (before.moe && now.moe && before.moe->dense_layers != now.moe->dense_layers)
    list.push_back({"model.moe.dense_layers", shape_text(before.moe->dense_layers), shape_text(now.moe->dense_layers)});
  if (before.num_layers == now.num_layers && windows(before) != windows(now))
    list.push_back({"model.sliding_window", joined(windows(before)) + " by layer", joined(windows(now))});
  return list;
}

std::vector<Difference> forward_differences(const ModelConfig& saved, const ModelConfig& current) {
  constexpr std::array kFree = {"model.init_std", "model.init_residual_scale", "model.logits_dtype"};
  std::vector<Difference> list = model_differences(saved, current);
  std::erase_if(list, [&](const Difference& one) { return std::ranges::find(kFree, one.key) != kFree.end(); });
  return list;
}

void require_same_model(const RunConfig& saved, const RunConfig& current, const std::string& source) {
  const std::vector<Difference> list = model_differences(saved.model, current.model);
  require(list.empty(), ExitCode::usage, source, " is a checkpoint of another model:\n  ", joined(list, "\n  "));
}

void require_initial_model(const RunConfig& saved, const RunConfig& current, const std::string& source) {
  const bool rotary = saved.model.position == Position::rope && current.model.position == Position::rope;
  const std::vector<std::string>& allowed = current.checkpoint.allow_model_change;
  std::vector<Difference> refused;
  for (const Difference& difference : forward_differences(saved.model, current.model)) {
    if (rotary && difference.key == "model.max_position_embeddings") continue;
    if (std::ranges::find(allowed, difference.key) == allowed.end())
      refused.push_back(difference);
    else
      log_warning("checkpoint.allow_model_change: ", difference);
  }
  if (refused.empty()) return;
  fail(ExitCode::usage, source, " has another model:\n  ", joined(refused, "\n  "), "\nremove the section model to use that model",
       takes_weights_of(saved.model, current.model) ? ", or list the keys that are meant to differ in checkpoint.allow_model_change"
                                                    : ": its weights do not fit this one");
}

std::vector<std::string> reconciled_weights(const TensorReader& weights, const PrecisionPlan& plan) {
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> changes;  // by module of any layer and what became of it
  for (const ModulePrecision& module : plan.modules()) {
    const std::string& path = module.module.path;
    const Quantization was = weights.has(path + ".weight") ? weights.form(path + ".weight").codes : Quantization{};
    const Quantization now = module.resident_codes();
    if (!was) continue;
    Quantization keeps = now;
    if (keeps.rule == ScaleRule::flashinfer) keeps.rule = ScaleRule::rceil;  // both keep the values of codes, whose rule no file names
    if (keeps.format == Format::nvfp4) keeps.rule = was.rule;
    if (keeps == was) continue;
    const bool same_blocks = now.format == was.format && now.block_rows == was.block_rows && now.block_cols == was.block_cols;
    const auto form = [&](const Quantization& how) {
      return same_blocks ? text(how) : text(format_name(how.format), ' ', how.block_rows, 'x', how.block_cols);
    };
    const std::string here = now ? form(now) : dtype_name(module.recipe.compute);
    changes[{any_layer(path), text(form(was), " in the file, ", here, " here")}].push_back(path);
  }
  std::vector<std::string> lines;
  for (const auto& [key, paths] : changes) lines.push_back(joined_path(paths) + ": " + key.second);
  return lines;
}

namespace {

// Requires that the checkpoint has these tensors of a model, PREFIX.NAME in fp32, and no others of this prefix.
void require_tensors(const CheckpointReader& reader, const std::string& source, const std::string& prefix, const char* kind,
                     const std::vector<ParameterShape>& of) {
  for (const ParameterShape& needed : of) {
    const std::string name = prefix + needed.name;
    require(reader.has(name), ExitCode::data, source, ": its model has ", needed.name, ", but there is no tensor ", name);
    const ManifestTensor& saved = reader.tensor(name);
    require(saved.dtype == Dtype::f32 && saved.shape == dimensions(needed.shape), ExitCode::data, source, ": ", needed.name,
            " of its model is fp32 ", shape_text(dimensions(needed.shape)), ", but the tensor is ", saved.dtype, " ",
            shape_text(saved.shape));
  }
  const auto found = std::ranges::count_if(reader.manifest().tensors, [&](const auto& tensor) { return tensor.name.starts_with(prefix); });
  require(std::cmp_equal(found, of.size()), ExitCode::data, source, ": its model has ", of.size(), " ", kind, ", but there are ", found);
}

// Reports an invalid config as damage of the checkpoint that holds it.
template <class Check>
auto as_data(const std::string& source, const Check& check) {
  try {
    return check();
  } catch (const Error& error) {
    fail(ExitCode::data, source, ": ", error.what());
  }
}

// Returns true if a manifest describes this tokenizer.
bool same_tokenizer(const std::string& described, const Tokenizer& tokenizer) {
  return parse_json(described, "the tokenizer of a manifest") == parse_json(tokenizer.to_json(), "a tokenizer");
}

}  // namespace

RunConfig for_ranks(RunConfig config, const ModelRanks& ranks) {
  config.parallel.data = config.parallel.expert = 1;
  config.parallel.tensor = ranks.tensor;
  config.parallel.sequence_parallel = ranks.sequence_parallel;
  ConfigReport report;
  divide_model(config.model, config.parallel.tensor, report);
  report.throw_if_failed();
  // Vocabulary padding is not stored: use the smallest that the plan allows.
  config.model.pad_vocab_to = config.parallel.tensor * (config.precision.fp8_output_proj.enabled ? 32 : 1);
  return config;
}

PrecisionPlan plan_for_tensors(const RunConfig& config, const CheckpointReader& reader, const RunConfig& use) {
  const std::string source = reader.config_source();
  as_data(source, [&] {  // checks as a run does; a saved config passed that before it was saved
    ConfigReport report;
    config.model.validate(report);
    if (config.training.seq_len > config.model.max_position_embeddings)
      report.error("training.seq_len", text("must be at most model.max_position_embeddings ", config.model.max_position_embeddings,
                                            ", got ", config.training.seq_len));
    report.throw_if_failed();
  });
  const ModelShape model = model_shape(config.model);
  require_tensors(reader, source, "master.", "parameters", parameter_shapes(model));
  require_tensors(reader, source, "buffer.", "buffers", buffer_shapes(model));
  as_data(source, [&] { resolve_plan(for_ranks(config, {})); });
  return resolve_plan(use);  // only another number of ranks, another dtype or other recipes can be wrong now
}

std::optional<Tokenizer> saved_tokenizer(CheckpointReader& reader) {
  const std::string& described = reader.manifest().tokenizer;
  if (described == "null") return std::nullopt;
  const std::string name = (reader.directory() / "manifest.json").string() + " (tokenizer)";
  if (parse_json(described, name).get("type").string() != choice_name(TokenizerKind::bpe)) return Tokenizer::from_json(described, name);
  std::optional<Tokenizer> read = tokenizer_of(tokenizer_files(reader), reader.directory().string());
  require(read && same_tokenizer(described, *read), ExitCode::data, name, ": does not match the checkpoint's tokenizer.json");
  return read;
}

RunConfig config_saved_at(const std::filesystem::path& path) {
  RunConfig config;
  load_checkpoint(path, [&config](CheckpointReader& reader) { config = reader.config(); });
  return config;
}

std::optional<Tokenizer> tokenizer_saved_at(const std::filesystem::path& path) {
  std::optional<Tokenizer> tokenizer;
  load_checkpoint(path, [&tokenizer](CheckpointReader& reader) {
    tokenizer = saved_tokenizer(reader);
    if (!tokenizer) tokenizer = tokenizer_of(tokenizer_files(reader), reader.directory().string());
  });
  return tokenizer;
}

std::optional<Tokenizer> tokenizer_of(const std::vector<TokenizerFile>& files, const std::string& source) {
  const auto bytes_of = [&](const char* name) {
    const auto found = std::ranges::find(files, name, &TokenizerFile::name);
    return found == files.end() ? std::string() : found->bytes;
  };
  std::string tokenizer = bytes_of("tokenizer.json");
  if (tokenizer.empty()) return std::nullopt;
  return Tokenizer::bpe({.tokenizer = std::move(tokenizer), .config = bytes_of("tokenizer_config.json")}, source + "/tokenizer.json");
}

std::vector<TokenizerFile> tokenizer_files(CheckpointReader& reader) {
  std::vector<TokenizerFile> files;
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    if (!tensor.name.starts_with(kTokenizerFilePrefix)) continue;
    const std::string name = tensor.name.substr(kTokenizerFilePrefix.size());
    const bool known = std::ranges::find(kTokenizerFiles, name) != kTokenizerFiles.end();
    require(known && tensor.dtype == Dtype::u8 && tensor.shape.size() == 1, ExitCode::data, reader.directory().string(), ": ", tensor.name,
            " must be a u8 vector, the bytes of a tokenizer or generation file");
    std::string bytes(static_cast<size_t>(tensor.shape[0]), '\0');
    reader.read(tensor.name, std::as_writable_bytes(std::span(bytes)));
    files.push_back({.name = name, .bytes = std::move(bytes)});
  }
  return files;
}

bool has_other_tokenizer(const CheckpointReader& reader, const Data& data) {
  const std::string& described = reader.manifest().tokenizer;
  return described != "null" && data.tokenizer && !same_tokenizer(described, *data.tokenizer);
}

SavedModel saved_model(const CheckpointReader& reader) {
  const RunConfig config = for_ranks(reader.config(), {});
  return {.config = config, .plan = plan_for_tensors(reader.config(), reader, config)};
}

int64_t verify_codes(CheckpointReader& reader, Backend& device) {
  if (reader.manifest().plan == "null") return 0;
  const PrecisionPlan plan = saved_model(reader).plan;
  CodesByWeight codes;
  for (const ModulePrecision& module : plan.modules()) {
    const Quantization how = module.resident_codes();
    if (!how) continue;
    const std::string name = module.module.path + ".weight";
    const Shape shape{module.module.rows() - module.module.padding, module.module.in};
    const Tensor master = empty(device, Dtype::f32, shape);
    const Box unpadded{.start = {0, 0}, .size = dimensions(shape)};
    fill_from_host(master, [&](std::span<std::byte> bytes) { reader.read("master." + name, unpadded, bytes); });
    const int64_t matrices = module.module.matrices;
    const CodePlace whole{.rows = shape[0], .columns = shape[1], .matrix_rows = matrices > 1 ? module.module.out : 0};
    codes[name] = {.how = text(how), .sums = std::vector<CodeSums>(static_cast<size_t>(matrices))};
    add_code_sums(quantized(converted(master, Dtype::bf16), how), whole, codes[name].sums);
  }
  require_same_codes(reader.manifest().plan, plan, codes, (reader.directory() / "manifest.json").string(), LoadFor::use);
  return static_cast<int64_t>(codes.size());
}

}  // namespace mantissa
