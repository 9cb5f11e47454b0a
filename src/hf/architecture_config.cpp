#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "checkpoint/saved_model.h"
#include "hf/architecture_table.h"
#include "json/json_fields.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

constexpr size_t kShownBytes = 80;

std::string shown(const Json& value) {
  const std::string whole = value.dump();
  return whole.size() <= kShownBytes ? whole : whole.substr(0, kShownBytes) + " ...";
}

bool is_whole(const Json& value) { return std::holds_alternative<int64_t>(value.scalar()); }

// Returns the name of the kind, "an integer", unless the value is of this kind.
const char* unmet(const Json& value, FieldKind kind) {
  switch (kind) {
    case FieldKind::boolean: return value.is_boolean() ? nullptr : "true or false";
    case FieldKind::integer: return is_whole(value) ? nullptr : "an integer";
    case FieldKind::number: return value.is_number() ? nullptr : "a number";
    case FieldKind::list: return value.is_list() && std::ranges::all_of(value.entries(), is_whole) ? nullptr : "a list of integers";
    default: return value.is_string() ? nullptr : "a string";
  }
}

}  // namespace

ArchitectureKeys::ArchitectureKeys(const Json& object, std::string source, std::string prefix)
    : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {
  const std::string name = prefix_.substr(0, prefix_.rfind('.'));  // name of the object
  require(object.is_object(), ExitCode::data, source_, ": ", name.empty() ? "must be" : name + " must be", " a JSON object");
}

bool ArchitectureKeys::has(const std::string& key) {
  known_.insert(key);
  return !object_.get(key).is_null();
}

bool ArchitectureKeys::is_null(const std::string& key) { return !has(key) && object_.contains(key); }

const Json& ArchitectureKeys::value(const std::string& key) { return object_.at(key); }

const Json* ArchitectureKeys::stated(const std::string& key, FieldKind kind) {
  if (!has(key)) return nullptr;
  if (const char* const wanted = unmet(value(key), kind)) wrong(key, wanted);
  return &value(key);
}

std::optional<int64_t> ArchitectureKeys::integer(const std::string& key) {
  const Json* const value = stated(key, FieldKind::integer);
  return value != nullptr ? std::optional(std::get<int64_t>(value->scalar())) : std::nullopt;
}

std::optional<double> ArchitectureKeys::number(const std::string& key) {
  const Json* const value = stated(key, FieldKind::number);
  return value != nullptr ? std::optional(value->number()) : std::nullopt;
}

std::string ArchitectureKeys::word(const std::string& key, const std::string& fallback) {
  const Json* const value = stated(key, FieldKind::text);
  return value != nullptr ? value->string() : fallback;
}

int64_t ArchitectureKeys::integer_or(const std::string& key, int64_t fallback) {
  require_not_null(key, FieldKind::integer);
  return integer(key).value_or(fallback);
}

void ArchitectureKeys::require_present(const std::string& key) {
  require(has(key), ExitCode::data, source_, ": ", name(key), " is missing");
}

void ArchitectureKeys::require_not_null(const std::string& key, FieldKind kind) {
  if (is_null(key)) wrong(key, unmet(nullptr, kind));
}

void ArchitectureKeys::only(const std::string& key, const std::vector<Json>& allowed) {
  if (!has(key) || std::ranges::find(allowed, value(key)) != allowed.end()) return;
  if (allowed.empty()) refuse(key, "mantissa knows it as null only");
  refuse(key, "mantissa computes only " + joined(allowed, " or ", [](const Json& one) { return one.dump(); }));
}

void ArchitectureKeys::require_all_known() const {
  std::vector<std::string> unknown;
  for (const auto& [key, value] : object_.members()) {
    if (!known_.contains(key) && !value.is_null()) unknown.push_back(text(name(key), " = ", shown(value)));
  }
  constexpr size_t kShown = 10;
  const size_t more = unknown.size() > kShown ? unknown.size() - kShown : 0;
  unknown.resize(unknown.size() - more);
  require(unknown.empty(), ExitCode::usage, source_, ": keys that mantissa does not know, and that may change what the model computes:\n  ",
          joined(unknown, "\n  "), more > 0 ? text("\n  and ", more, " more") : "", "\nremove them if they change nothing");
}

void ArchitectureKeys::refuse(const std::string& key, const std::string& why) const {
  fail(ExitCode::usage, source_, ": ", name(key), " = ", shown(object_.at(key)), ": ", why);
}

void ArchitectureKeys::wrong(const std::string& key, const std::string& wanted) const {
  fail(ExitCode::data, source_, ": ", name(key), " must be ", wanted, ", got ", shown(object_.at(key)));
}

namespace {

// Converts the config.json of an architecture to a ModelConfig, and back; finds the architecture that has the options of a model.

struct ArchitectureName {
  Architecture architecture;
  const char* type;
  const char* class_name;
};
constexpr std::array kArchitectures = {ArchitectureName{Architecture::llama, "llama", "LlamaForCausalLM"},
                                       ArchitectureName{Architecture::qwen2, "qwen2", "Qwen2ForCausalLM"},
                                       ArchitectureName{Architecture::qwen3, "qwen3", "Qwen3ForCausalLM"},
                                       ArchitectureName{Architecture::qwen3_moe, "qwen3_moe", "Qwen3MoeForCausalLM"},
                                       ArchitectureName{Architecture::mixtral, "mixtral", "MixtralForCausalLM"},
                                       ArchitectureName{Architecture::gpt2, "gpt2", "GPT2LMHeadModel"},
                                       ArchitectureName{Architecture::gpt_oss, "gpt_oss", "GptOssForCausalLM"}};

const ArchitectureName& name_of(Architecture architecture) {
  return *std::ranges::find_if(kArchitectures, [&](const ArchitectureName& one) { return one.architecture == architecture; });
}

Json parsed_config(std::string_view content, const std::string& source) {
  Json config = parse_json(content, source);
  require(config.is_object(), ExitCode::data, source, ": must be a JSON object");
  return config;
}

using Words = std::vector<std::pair<Json, Json>>;

// Returns the words of the file for the choices of an option; empty: they are those of the option.
Words words_of(const ArchitectureKey& key) {
  Words words;
  for (const auto& [value, choice] : key.words) {
    if (choice != nullptr) words.emplace_back(json_of(value), choice);
  }
  return words;
}

void write_key(const ArchitectureKey& key, Architecture architecture, ModelConfig& model, Json& out) {
  if (key.write != nullptr) return key.write(architecture, model, out);
  if (key.key == nullptr || key.kind == KeyKind::must_be || key.kind == KeyKind::ignored || key.kind == KeyKind::training) return;
  Json value = key.option != nullptr ? json_of(option_field(model, key.option).get()) : json_of(key.value);
  const Words words = words_of(key);
  const auto word = std::ranges::find(words, value, &Words::value_type::second);
  if (word != words.end()) value = word->first;
  require(!value.is_null() || key.kind != KeyKind::needed, "a config.json needs ", key.key);
  if (!value.is_null()) out.add(key.key, std::move(value));
}

// Writes null where a model has no such token, because transformers would take the architecture's default.
Json ids(const std::vector<int64_t>& tokens) { return tokens.empty() ? Json() : tokens.size() == 1 ? Json(tokens.front()) : Json(tokens); }

}  // namespace

const char* architecture_name(Architecture architecture) { return name_of(architecture).type; }
const char* architecture_class(Architecture architecture) { return name_of(architecture).class_name; }

Field option_field(ModelConfig& model, const std::string& option) {
  std::vector<Field> fields = fields_of(model);
  for (const std::string& section : split(option, '.')) {
    const auto found = std::ranges::find(fields, section, &Field::name);
    require(found != fields.end(), "model.", option, " is no option");
    const Field field = *found;
    if (field.kind() != FieldKind::object) return field;
    fields = field.members();
  }
  fail(ExitCode::internal, "model.", option, " is a section");
}

ArchitectureReader::ArchitectureReader(ArchitectureKeys& file, Architecture of) : keys(file), architecture(of) {
  if (of == Architecture::qwen3_moe || of == Architecture::mixtral || of == Architecture::gpt_oss) model.moe.emplace();
}

void ArchitectureReader::read(const ArchitectureTable& table, ArchitectureKeys& from) {
  for (const ArchitectureKey& key : table) {
    switch (key.kind) {
      case KeyKind::implied: set(key.option, key.option, json_of(key.value)); break;
      case KeyKind::must_be:
      case KeyKind::stated: from.only(key.key, {json_of(key.value)}); break;
      case KeyKind::ignored:
      case KeyKind::written: from.ignore(split(key.key, ' ')); break;
      case KeyKind::training:
        if (from.has(key.key) && from.value(key.key) != json_of(key.value)) say(key.key, key.option);
        break;
      case KeyKind::topic: key.read(*this); break;
      default: read_option(key, from);
    }
  }
}

void ArchitectureReader::read_option(const ArchitectureKey& key, ArchitectureKeys& from) {
  const Words words = words_of(key);
  FieldKind kind = option_field(model, key.option).kind();
  if (!words.empty()) kind = words.front().first.is_boolean() ? FieldKind::boolean : FieldKind::text;
  if (key.kind == KeyKind::needed) from.require_present(key.key);
  if (key.kind == KeyKind::value) from.require_not_null(key.key, kind);
  const Json* const stated = from.stated(key.key, kind);
  Json value = stated != nullptr ? *stated : json_of(key.value);
  if (key.kind == KeyKind::nullable && from.is_null(key.key)) value = nullptr;
  if (!words.empty()) {
    const auto word = std::ranges::find(words, value, &Words::value_type::first);
    if (word == words.end())
      from.refuse(key.key, "mantissa knows " + joined(words, ", ", [](const auto& known) { return known.first.dump(); }));
    value = word->second;
  }
  set(key.option, from.name(key.key), value);
}

void ArchitectureReader::set(const std::string& option, const std::string& key, const Json& value) {
  keys_of_options_[option] = key;
  if (value.is_null()) return;
  const Field field = option_field(model, option);
  const JsonReader reader(value, key);
  try {
    switch (field.kind()) {
      case FieldKind::boolean: field.set(reader.as<bool>()); break;
      case FieldKind::integer: field.set(reader.as<int64_t>(field.limits)); break;
      case FieldKind::number: field.set(reader.as<double>(field.limits)); break;
      default: require(field.set(reader.as<std::string>()), "model.", option, " has no choice ", value.dump());
    }
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
    problems_.emplace(error.what(), key);
  }
}

int64_t ArchitectureReader::layers() const {
  if (std::ranges::any_of(problems_, [](const auto& problem) { return problem.second == "num_hidden_layers"; })) throw_problems();
  return model.num_layers;
}

void ArchitectureReader::drop_experts() {
  model.moe.reset();
  for (const auto& [option, key] : keys_of_options_) {
    if (option.starts_with("moe.")) std::erase_if(problems_, [&name = key](const auto& problem) { return problem.second == name; });
  }
}

void ArchitectureReader::say(const std::string& key, const std::string& what) {
  training_keys.push_back(text(key, keys.has(key) ? " = " + keys.value(key).shown() : "", " ", what));
}

void ArchitectureReader::throw_problems() const {
  require(problems_.empty(), ExitCode::usage, keys.source(), ": ",
          problems_.size() > 1 ? text(problems_.size(), " errors in the configuration:\n  ") : "",
          joined(problems_, "\n  ", [](const auto& problem) { return problem.first; }));
}

void ArchitectureReader::require_valid() {
  throw_problems();
  model.validate([&](const std::string& option, const std::string& why) { problems_.emplace(message_of(option, why), option); });
  throw_problems();
}

// Replaces options by keys of the file. An option without its section is of that of the first.
std::string ArchitectureReader::message_of(const std::string& option, const std::string& why) {
  const std::string section = option.substr(0, option.rfind('.') + 1);
  const auto key_of = [&](const std::string& word) {
    const std::string whole = word.starts_with("model.") ? word : section + word;
    const auto found = keys_of_options_.find(whole.substr(whole.find('.') + 1));
    return found != keys_of_options_.end() ? found->second : word;
  };
  const std::string key = key_of(option);
  const bool of_class = key.find('.') == std::string::npos && !keys.has(key);
  return text(key, ": ", joined(split(why, ' '), " ", key_of),
              of_class ? "; the file does not say, so its class in transformers does" : "");
}

namespace {

constexpr const char* kExpertDtype = "expert_dtype";
constexpr const char* kMlxQuantization = "quantization";  // keys of mlx-lm
constexpr const char* kMlxActivations = "quantize_activations";

// Returns mlx-lm's own keys; "": there are none. mlx-lm writes them into quantization_config, too, and reads that only where they are
// absent.
std::string mlx_quantization_of(ArchitectureKeys& keys) {
  const Json* const activations = keys.stated(kMlxActivations, FieldKind::boolean);
  if (!keys.has(kMlxQuantization)) {
    if (activations != nullptr && *activations == true) keys.refuse(kMlxActivations, text("there is no ", kMlxQuantization));
    return {};
  }
  const Json& quantization = keys.value(kMlxQuantization);
  if (!quantization.is_object()) keys.wrong(kMlxQuantization, "an object");
  Json out = {{kMlxQuantization, quantization}};
  if (activations != nullptr) out.add(kMlxActivations, *activations);
  return out.dump();
}

// DeepSeek-V4 says beside quantization_config how its routed experts are packed.
std::string quantization_of(ArchitectureKeys& keys, bool experts) {
  const std::string expert_dtype = experts ? keys.word(kExpertDtype, "") : "";
  if (!keys.has("quantization_config")) {
    if (!expert_dtype.empty()) keys.refuse(kExpertDtype, "there is no quantization_config of which it says what experts are: remove it");
    return {};
  }
  Json quantization = keys.value("quantization_config");
  if (!quantization.get(kExpertDtype).is_null())
    keys.refuse("quantization_config", text("mantissa reads ", kExpertDtype, " beside it, as DeepSeek-V4 has it"));
  if (expert_dtype.empty()) return quantization.dump();
  const Json method = quantization.get("quant_method");
  if (!method.is_string() || method.string() != "fp8")
    keys.refuse(kExpertDtype, "it is of quant_method fp8, which quantization_config has not: remove it");
  quantization[kExpertDtype] = expert_dtype;
  return quantization.dump();
}

}  // namespace

ArchitectureConfig read_architecture_config(std::string_view content, const std::string& source) {
  const Json config = parsed_config(content, source);
  ArchitectureKeys keys(config, source);
  const std::string type = keys.word("model_type", "");
  const auto found = std::ranges::find_if(kArchitectures, [&](const ArchitectureName& one) { return type == one.type; });
  require(found != kArchitectures.end(), ExitCode::usage, source, ": model_type \"", shortened(type), "\": mantissa knows ",
          joined(kArchitectures, ", ", [](const ArchitectureName& one) { return one.type; }));
  keys.only("architectures", {Json(Json::Entries{found->class_name})});
  ArchitectureConfig out{.architecture = found->architecture};
  const std::string dtype = keys.word("dtype", keys.word("torch_dtype", "float32"));
  if (dtype != "bfloat16" && dtype != "float32" && dtype != "float16")
    keys.refuse(keys.has("dtype") ? "dtype" : "torch_dtype", "mantissa knows bfloat16, float16 and float32");
  out.dtype = dtype == "bfloat16" ? Dtype::bf16 : Dtype::f32;
  out.says_dtype = keys.has("dtype") || keys.has("torch_dtype");
  ArchitectureReader reader(keys, out.architecture);
  reader.read(architecture_table(out.architecture), keys);
  out.quantization = mlx_quantization_of(keys);
  if (out.quantization.empty()) out.quantization = quantization_of(keys, reader.model.moe.has_value());
  keys.require_all_known();
  reader.require_valid();
  out.model = reader.model;
  out.training_keys = std::move(reader.training_keys);
  return out;
}

namespace {

void write_router_loss(const ModelConfig& model, const RouterLossKeys& from, Json& out) {
  double coefficient = model.moe->aux_loss_coef;
  if (coefficient == 0.0 && !from.asked && from.coefficient) {
    coefficient = *from.coefficient;
  } else {  // with 15 digits, which survive the way to this meaning and back
    const double layers = static_cast<double>(model.expert_layers()), chosen = static_cast<double>(model.moe->num_experts_per_tok);
    std::array<char, 32> digits{};
    char* const end =
        std::to_chars(digits.data(), digits.data() + digits.size(), coefficient * layers / chosen, std::chars_format::general, 15).ptr;
    std::from_chars(digits.data(), end, coefficient);
  }
  out.add("router_aux_loss_coef", coefficient);
  out.add("output_router_logits", from.asked);
}

}  // namespace

std::string architecture_config(const ModelConfig& model, Dtype dtype, const SpecialTokens& tokens, const std::string& quantization,
                                const RouterLossKeys& router_loss) {
  const Architecture architecture = architecture_of(model);
  Json out = {{"architectures", {architecture_class(architecture)}}, {"model_type", architecture_name(architecture)}};
  ModelConfig derived = with_derived(model);
  const bool plain_heads = model.head_size() * model.num_attention_heads == model.hidden_size;
  if (architecture == Architecture::qwen2 && plain_heads) derived.head_dim.reset();  // its class has none
  for (const ArchitectureKey& key : architecture_table(architecture)) write_key(key, architecture, derived, out);
  if (model.moe) write_router_loss(model, router_loss, out);
  out.add("bos_token_id", ids(tokens.begin));
  out.add("eos_token_id", ids(tokens.end));
  if (!tokens.pad.empty()) out.add("pad_token_id", ids(tokens.pad));
  out.add("torch_dtype", dtype == Dtype::bf16 ? "bfloat16" : "float32");
  if (!quantization.empty()) {
    Json described = parse_json(quantization, "quantization_config", ExitCode::internal);
    if (described.contains(kMlxQuantization)) {
      for (const char* const key : {kMlxQuantization, kMlxActivations})
        if (described.contains(key)) out.add(key, described.at(key));
      return out.dump(2, Json::Order::keys) + "\n";
    }
    if (const Json expert_dtype = described.get(kExpertDtype); !expert_dtype.is_null()) {
      described.members().erase(kExpertDtype);
      out.add(kExpertDtype, expert_dtype);
    }
    out.add("quantization_config", std::move(described));
  }
  return out.dump(2, Json::Order::keys) + "\n";
}

RouterLossKeys read_router_loss_keys(std::string_view content, const std::string& source) {
  const Json config = parsed_config(content, source);
  const Json& coefficient = config.get("router_aux_loss_coef");
  return {.asked = config.get("output_router_logits") == Json(true),
          .coefficient = coefficient.is_number() ? std::optional(coefficient.number()) : std::nullopt};
}

SpecialTokens read_special_tokens(std::string_view content, const std::string& source) {
  const Json config = parsed_config(content, source);
  const auto tokens = [&](const char* name) -> std::vector<int64_t> {
    const Json& ids = config.get(name);
    if (ids.is_null()) return {};
    const JsonReader reader(ids, source, name);
    if (ids.is_list()) return reader.as<std::vector<int64_t>>();
    reader.require(ids.is_integer(), "must be a token id or a list of them, got ", ids.shown());
    return {reader.as<int64_t>()};
  };
  return {.begin = tokens("bos_token_id"), .end = tokens("eos_token_id"), .pad = tokens("pad_token_id")};
}

// Finds the architecture.

namespace {

// Reasons why a model does not belong to an architecture, as "model.qk_norm must be false".
struct Problems {
  std::vector<std::string> list = {};
  void need(bool holds, const std::string& problem) {
    if (!holds) list.push_back(problem);
  }
};

Architecture nearest_architecture(const ModelConfig& model) {
  if (model.norm == Norm::layer || model.position == Position::learned || !model.gated()) return Architecture::gpt2;
  if (model.activation == Activation::swiglu_clamped) return Architecture::gpt_oss;
  if (model.moe) return model.qk_norm ? Architecture::qwen3_moe : Architecture::mixtral;
  if (model.qk_norm) return Architecture::qwen3;
  return model.attention_bias == AttentionBias::qkv ? Architecture::qwen2 : Architecture::llama;
}

void need_implied(Problems& problems, Architecture architecture, ModelConfig& model) {
  for (const ArchitectureKey& key : architecture_table(architecture)) {
    if (key.kind != KeyKind::implied || (!model.moe && std::string_view(key.option).starts_with("moe."))) continue;
    const Json wanted = json_of(key.value), found = json_of(option_field(model, key.option).get());
    problems.need(found == wanted, text("model.", key.option, " must be ", wanted.is_string() ? wanted.string() : wanted.dump()));
  }
}

void need_experts(Problems& problems, Architecture architecture, const MoeConfig& moe) {
  problems.need(!moe.has_expert_bias(), "model.moe.bias_update_rate: the architecture has no expert biases");
  problems.need(moe.score == RouterScore::softmax, "model.moe.score: the architecture has softmax");
  problems.need(moe.n_group == 1, "model.moe.n_group: the architecture chooses among all experts");
  problems.need(moe.routed_scaling_factor == 1.0, "model.moe.routed_scaling_factor: the architecture has none");
  problems.need(!moe.force_balance, "model.moe.force_balance: the architecture chooses by scores");
  problems.need(moe.shared_intermediate_size == 0, "model.moe.shared_intermediate_size: the architecture has no shared experts");
  if (architecture == Architecture::gpt_oss)
    return problems.need(moe.dense_layers.empty(), "model.moe.dense_layers: every layer has experts");
  problems.need(!moe.router_bias, "model.moe.router_bias: only gpt-oss has it, with model.activation swiglu_clamped");
  problems.need(!moe.expert_mlp_bias, "model.moe.expert_mlp_bias: only gpt-oss has them, with model.activation swiglu_clamped");
  problems.need(architecture == Architecture::qwen3_moe || moe.dense_layers.empty(),
                "model.moe.dense_layers: Mixtral has experts in every layer");
}

void need_gpt2(Problems& problems, const ModelConfig& model) {
  problems.need(!model.sliding_window, "model.sliding_window: GPT-2 has none");
  problems.need(!model.moe, "model.moe: GPT-2 has no experts");
  problems.need(!model.gated(), "model.activation must be a GELU");
  problems.need(model.kv_heads() == model.num_attention_heads, "model.num_key_value_heads must be num_attention_heads");
  problems.need(model.head_size() * model.num_attention_heads == model.hidden_size,
                "model.head_dim must be hidden_size / num_attention_heads");
}

void need_rms(Problems& problems, Architecture architecture, const ModelConfig& model) {
  const bool llama = architecture == Architecture::llama, qkv = model.attention_bias == AttentionBias::qkv;
  problems.need(!qkv || architecture == Architecture::qwen2,
                "model.attention_bias: qkv without one for out is Qwen2's, which has neither qk_norm nor experts");
  problems.need(architecture != Architecture::mixtral || model.attention_bias == AttentionBias::none,
                "model.attention_bias: Mixtral has none");
  problems.need(llama || !model.mlp_bias, "model.mlp_bias: only Llama has it, without qk_norm");
  problems.need(!llama || !model.sliding_window, "model.sliding_window: Llama has none; Qwen3 has, with model.qk_norm");
  problems.need(!model.moe || model.sliding_layers.empty(),
                "model.sliding_layers: Mixtral and Qwen3-MoE have windows in all layers or none");
  problems.need(!llama || model.hidden_size % model.num_attention_heads == 0,
                "model.num_attention_heads: transformers refuses a Llama whose hidden_size is no multiple of it");
}

}  // namespace

Architecture architecture_of(const ModelConfig& given) {
  ModelConfig model = with_derived(given);
  const Architecture architecture = nearest_architecture(model);
  const bool gpt2 = architecture == Architecture::gpt2, gpt_oss = architecture == Architecture::gpt_oss;
  Problems problems;
  need_implied(problems, architecture, model);
  problems.need(gpt_oss || !model.attention_sinks, "model.attention_sinks: only gpt-oss has them, with model.activation swiglu_clamped");
  problems.need(!gpt_oss || model.moe, "model.moe: every layer has experts");
  if (model.moe && !gpt2) need_experts(problems, architecture, *model.moe);
  if (gpt2) need_gpt2(problems, model);
  if (!gpt2 && !gpt_oss) need_rms(problems, architecture, model);
  const char* nearest = gpt2 ? ", of which GPT-2 is the nearest" : gpt_oss ? ", of which gpt-oss is the nearest" : "";
  if (architecture == Architecture::mixtral)
    nearest = ", of which Mixtral is the nearest, the only one with experts and without model.qk_norm";
  require(problems.list.empty(), ExitCode::usage, "no model of Hugging Face has these options", nearest, ":\n  ",
          joined(problems.list, "\n  "));
  return architecture;
}

}  // namespace mantissa
