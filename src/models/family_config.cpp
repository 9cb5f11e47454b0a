// config.json of a family to a ModelConfig.
#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "mantissa/base/json.h"
#include "mantissa/models/hugging_face.h"
#include "models/family_keys.h"

namespace mantissa {
namespace {

using nlohmann::json;

struct FamilyName {
  Family family;
  const char* type;
  const char* architecture;
};
constexpr std::array kFamilies = {
    FamilyName{Family::llama, "llama", "LlamaForCausalLM"},       FamilyName{Family::qwen2, "qwen2", "Qwen2ForCausalLM"},
    FamilyName{Family::qwen3, "qwen3", "Qwen3ForCausalLM"},       FamilyName{Family::qwen3_moe, "qwen3_moe", "Qwen3MoeForCausalLM"},
    FamilyName{Family::mixtral, "mixtral", "MixtralForCausalLM"}, FamilyName{Family::gpt2, "gpt2", "GPT2LMHeadModel"},
    FamilyName{Family::gpt_oss, "gpt_oss", "GptOssForCausalLM"}};

const FamilyName& name_of(Family family) {
  return *std::ranges::find_if(kFamilies, [&](const FamilyName& one) { return one.family == family; });
}

Family family_named(FamilyKeys& keys, const std::string& source) {
  const std::string type = keys.word("model_type", "");
  const auto found = std::ranges::find_if(kFamilies, [&](const FamilyName& one) { return type == one.type; });
  require(found != kFamilies.end(), ExitCode::usage, source, ": model_type \"", shortened(type), "\": mantissa knows ",
          joined(kFamilies, ", ", [](const FamilyName& one) { return one.type; }));
  keys.only("architectures", {json::array({found->architecture})});
  return found->family;
}

// What says nothing of the mathematics of a causal language model, in any family: how it is run, saved, trained or asked.
constexpr std::initializer_list<const char*> kNeutral = {"_name_or_path",
                                                         "_attn_implementation",
                                                         "attn_implementation",
                                                         "attention_dropout",
                                                         "auto_map",
                                                         "bad_words_ids",
                                                         "bos_token_id",
                                                         "chunk_size_feed_forward",
                                                         "classifier_dropout",
                                                         "cross_attention_hidden_size",
                                                         "decoder_start_token_id",
                                                         "diversity_penalty",
                                                         "do_sample",
                                                         "early_stopping",
                                                         "encoder_no_repeat_ngram_size",
                                                         "eos_token_id",
                                                         "exponential_decay_length_penalty",
                                                         "finetuning_task",
                                                         "forced_bos_token_id",
                                                         "forced_eos_token_id",
                                                         "id2label",
                                                         "initializer_range",
                                                         "is_decoder",
                                                         "label2id",
                                                         "length_penalty",
                                                         "max_length",
                                                         "min_length",
                                                         "no_repeat_ngram_size",
                                                         "num_beam_groups",
                                                         "num_beams",
                                                         "num_return_sequences",
                                                         "output_attentions",
                                                         "output_hidden_states",
                                                         "output_router_logits",
                                                         "output_scores",
                                                         "pad_token_id",
                                                         "prefix",
                                                         "problem_type",
                                                         "pruned_heads",
                                                         "quantization_config",
                                                         "remove_invalid_values",
                                                         "repetition_penalty",
                                                         "return_dict",
                                                         "return_dict_in_generate",
                                                         "sep_token_id",
                                                         "suppress_tokens",
                                                         "task_specific_params",
                                                         "temperature",
                                                         "tf_legacy_loss",
                                                         "tie_encoder_decoder",
                                                         "tokenizer_class",
                                                         "top_k",
                                                         "top_p",
                                                         "torchscript",
                                                         "transformers_version",
                                                         "typical_p",
                                                         "unsloth_fixed",
                                                         "unsloth_version",
                                                         "use_bfloat16",
                                                         "use_cache"};

void ignore_neutral(FamilyKeys& keys) {
  keys.ignore(kNeutral);
  keys.only("is_encoder_decoder", {false});
  keys.only("add_cross_attention", {false});
}

Dtype dtype_of(FamilyKeys& keys) {
  const std::string older = keys.word("torch_dtype", "float32"), dtype = keys.word("dtype", older);
  if (dtype == "bfloat16") return Dtype::bf16;
  if (dtype != "float32" && dtype != "float16")
    keys.refuse(keys.has("dtype") ? "dtype" : "torch_dtype", "mantissa knows bfloat16, float16 and float32");
  return Dtype::f32;
}

// Members that are named alike here; null where the family says nothing.
json scaling_of(FamilyKeys& rope, const std::string& type, int64_t longest) {
  json out = {{"type", type}, {"original_max_position_embeddings", rope.integer("original_max_position_embeddings").value_or(longest)}};
  const auto original = static_cast<double>(out["original_max_position_embeddings"].get<int64_t>());
  out["factor"] = rope.number("factor").value_or(static_cast<double>(longest) / std::max(1.0, original));
  const std::vector<const char*> llama3 = {"low_freq_factor", "high_freq_factor"},
                                 yarn = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"};
  for (const char* const name : type == "yarn" ? yarn : llama3) {
    if (const std::optional<double> number = rope.number(name)) out[name] = *number;
  }
  if (type == "yarn" && rope.has("truncate")) out["truncate"] = rope.flag("truncate", true);
  return out;
}

// Angles of rotary positions: rope_theta and rope_scaling, or both in rope_parameters.
void read_rope(FamilyKeys& keys, const std::string& source, double default_theta, json& model) {
  keys.only("partial_rotary_factor", {1.0, 1});
  std::optional<double> theta = keys.number("rope_theta");
  for (const char* const name : {"rope_scaling", "rope_parameters"}) {
    if (!keys.has(name)) continue;
    FamilyKeys rope(keys.value(name), source, std::string(name) + ".");
    if (const std::optional<double> inside = rope.number("rope_theta")) theta = inside;
    rope.only("partial_rotary_factor", {1.0, 1});
    const std::string type = rope.word("rope_type", rope.word("type", "default"));
    const bool scales = type == "llama3" || type == "yarn";
    if (!scales && type != "default") rope.refuse(rope.has("rope_type") ? "rope_type" : "type", "mantissa knows default, llama3 and yarn");
    rope.ignore({"type"});
    if (scales) model["rope_scaling"] = scaling_of(rope, type, model["max_position_embeddings"].get<int64_t>());
    rope.require_all_known();
  }
  model["rope_theta"] = theta.value_or(default_theta);
}

// Which layers see only the last tokens: by layer_types, else all of Mixtral's, and of Qwen's those from max_window_layers on.
void read_windows(FamilyKeys& keys, Family family, json& model) {
  const auto layers = model["num_layers"].get<int64_t>();
  const bool always = family == Family::mixtral || family == Family::gpt_oss;
  const bool uses = keys.flag("use_sliding_window", false) || always;
  const int64_t first = keys.integer("max_window_layers").value_or(28);
  std::optional<int64_t> window = keys.integer("sliding_window");
  if (!window && !keys.is_null("sliding_window")) {  // as the classes of transformers have it
    if (family == Family::gpt_oss) window = 128;
    if (!always && uses) window = 4096;
  }
  std::vector<int64_t> sliding;
  for (int64_t i = 0; i < layers && uses && window; ++i) {
    if (always || family == Family::qwen3_moe || i >= first) sliding.push_back(i);
  }
  if (keys.has("layer_types")) {
    const json& types = keys.value("layer_types");
    const bool known = types.is_array() && std::cmp_equal(types.size(), layers) &&
                       std::ranges::all_of(types, [](const json& type) { return type == "full_attention" || type == "sliding_attention"; });
    if (!known) keys.refuse("layer_types", "mantissa knows \"full_attention\" and \"sliding_attention\", one for each layer");
    sliding.clear();
    for (int64_t i = 0; i < layers; ++i) {
      if (types[static_cast<size_t>(i)] == "sliding_attention") sliding.push_back(i);
    }
    if (!sliding.empty() && !window) keys.refuse("layer_types", "there is no sliding_window");
  } else if (family == Family::gpt_oss) {
    if (!window) keys.refuse("sliding_window", "every second layer of gpt-oss has one, unless layer_types says otherwise");
    std::erase_if(sliding, [](int64_t layer) { return layer % 2 == 1; });
  }
  if (sliding.empty()) return;
  model["sliding_window"] = *window;
  if (std::cmp_less(sliding.size(), layers)) model["sliding_layers"] = sliding;
}

// Before anything is done for each of them.
int64_t layers_of(FamilyKeys& keys) {
  constexpr int64_t kMost = 10000;
  const int64_t layers = keys.needed_integer("num_hidden_layers");
  if (layers < 1 || layers > kMost) keys.refuse("num_hidden_layers", text("mantissa takes 1 to ", kMost));
  return layers;
}

json common_options(FamilyKeys& keys, const std::string& source, Family family) {
  json model = {{"vocab_size", keys.needed_integer("vocab_size")},
                {"hidden_size", keys.needed_integer("hidden_size")},
                {"num_layers", layers_of(keys)},
                {"num_attention_heads", keys.needed_integer("num_attention_heads")},
                {"intermediate_size", keys.needed_integer("intermediate_size")},
                {"max_position_embeddings", keys.integer("max_position_embeddings").value_or(family == Family::mixtral ? 131072 : 2048)},
                {"norm", "rms"},
                {"position", "rope"},
                {"activation", "swiglu"},
                {"norm_eps", keys.number("rms_norm_eps").value_or(family == Family::mixtral || family == Family::gpt_oss ? 1e-5 : 1e-6)},
                {"tie_word_embeddings", keys.flag("tie_word_embeddings", false)}};
  if (const auto heads = keys.integer("num_key_value_heads")) model["num_key_value_heads"] = *heads;
  if (const auto size = keys.integer("head_dim")) model["head_dim"] = *size;
  keys.only("hidden_act", {"silu"});
  read_rope(keys, source, family == Family::mixtral ? 1e6 : family == Family::gpt_oss ? 150000.0 : 1e4, model);
  if (family != Family::llama) read_windows(keys, family, model);  // its class has none
  return model;
}

json experts_of(FamilyKeys& keys) {
  const std::optional<int64_t> local = keys.integer("num_local_experts"), plain = keys.integer("num_experts");
  json moe = {{"num_experts", local ? *local : plain.value_or(0)},
              {"num_experts_per_tok", keys.needed_integer("num_experts_per_tok")},
              {"aux_loss_coef", keys.number("router_aux_loss_coef").value_or(0.001)}};
  return moe;
}

// Layer i has experts unless it is listed in mlp_only_layers or decoder_sparse_step passes over it.
std::vector<int64_t> dense_layers(FamilyKeys& keys, int64_t layers) {
  const std::vector<int64_t> given = keys.integers("mlp_only_layers");
  const std::set<int64_t> listed(given.begin(), given.end());
  const int64_t step = keys.integer("decoder_sparse_step").value_or(1);
  if (step < 1) keys.wrong("decoder_sparse_step", "1 or more");
  std::vector<int64_t> dense;
  for (int64_t i = 0; i < layers; ++i) {
    if (listed.contains(i) || (i + 1) % step != 0) dense.push_back(i);
  }
  return dense;
}

json rms_options(FamilyKeys& keys, const std::string& source, Family family) {
  json model = common_options(keys, source, family);
  const bool qwen3 = family == Family::qwen3 || family == Family::qwen3_moe;
  model["qk_norm"] = qwen3;
  if (family == Family::qwen2) model["attention_bias"] = "qkv";
  if (family == Family::llama || qwen3) model["attention_bias"] = keys.flag("attention_bias", false) ? "all" : "none";
  if (family == Family::llama) {
    model["mlp_bias"] = keys.flag("mlp_bias", false);
    keys.only("pretraining_tp", {1});
  }
  if (family == Family::mixtral) {
    json moe = experts_of(keys);
    moe["intermediate_size"] = model["intermediate_size"];
    moe["norm_topk_prob"] = true;
    keys.only("router_jitter_noise", {0.0, 0});
    model["moe"] = std::move(moe);
  }
  if (family == Family::qwen3_moe) {
    json moe = experts_of(keys);
    if (moe["num_experts"] == 0) fail(ExitCode::usage, source, ": num_experts: a qwen3_moe without experts; write it as qwen3");
    moe["intermediate_size"] = keys.needed_integer("moe_intermediate_size");
    moe["norm_topk_prob"] = keys.flag("norm_topk_prob", false);
    const auto layers = model["num_layers"].get<int64_t>();
    const std::vector<int64_t> dense = dense_layers(keys, layers);
    moe["dense_layers"] = dense;
    if (std::cmp_less(dense.size(), layers)) model["moe"] = std::move(moe);
  }
  return model;
}

json gpt_oss_options(FamilyKeys& keys, const std::string& source) {
  json model = common_options(keys, source, Family::gpt_oss);
  if (keys.is_null("rope_scaling") && !keys.has("rope_parameters")) {
    keys.refuse("rope_scaling",
                "transformers 4 takes this as unscaled and transformers 5 as yarn; write {\"rope_type\": \"default\"} or the scaling");
  }
  if (!keys.has("rope_scaling") && !keys.has("rope_parameters")) {  // as transformers' class has it
    model["rope_scaling"] = {{"type", "yarn"},   {"factor", 32.0},    {"beta_fast", 32.0},
                             {"beta_slow", 1.0}, {"truncate", false}, {"original_max_position_embeddings", 4096}};
  }
  keys.only("attention_bias", {true});
  keys.only("swiglu_alpha", {1.702});
  keys.ignore({"initial_context_length", "experts_per_token"});
  json moe = experts_of(keys);
  moe.update({{"intermediate_size", model["intermediate_size"]},
              {"score_after_choice", true},
              {"norm_topk_prob", true},
              {"router_bias", true},
              {"expert_mlp_bias", true}});
  model.update({{"qk_norm", false},
                {"attention_bias", "all"},
                {"attention_sinks", true},
                {"activation", "swiglu_clamped"},
                {"swiglu_limit", keys.number("swiglu_limit").value_or(7.0)},
                {"moe", std::move(moe)}});
  return model;
}

json gpt2_options(FamilyKeys& keys) {
  const int64_t hidden = keys.needed_integer("n_embd");
  const std::map<std::string, std::string> activations = {
      {"gelu_new", "gelu_tanh"}, {"gelu_pytorch_tanh", "gelu_tanh"}, {"gelu", "gelu_erf"}};
  const std::string activation = keys.word("activation_function", "gelu_new");
  if (!activations.contains(activation)) keys.refuse("activation_function", "mantissa knows gelu_new, gelu_pytorch_tanh and gelu");
  keys.ignore({"n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout",
               "summary_proj_to_labels", "summary_type", "summary_use_proj"});
  keys.only("scale_attn_weights", {true});
  keys.only("scale_attn_by_inverse_layer_idx", {false});
  return {{"vocab_size", keys.needed_integer("vocab_size")},
          {"hidden_size", hidden},
          {"num_layers", keys.needed_integer("n_layer")},
          {"num_attention_heads", keys.needed_integer("n_head")},
          {"intermediate_size", keys.integer("n_inner").value_or(hidden > INT64_MAX / 4 ? hidden : 4 * hidden)},
          {"max_position_embeddings", keys.integer("n_positions").value_or(1024)},
          {"norm", "layer"},
          {"norm_bias", true},
          {"norm_eps", keys.number("layer_norm_epsilon").value_or(1e-5)},
          {"position", "learned"},
          {"activation", activations.at(activation)},
          {"attention_bias", "all"},
          {"mlp_bias", true},
          {"qk_norm", false},
          {"tie_word_embeddings", keys.flag("tie_word_embeddings", true)}};
}

struct ModelSection {
  ModelConfig model;
  void fields(auto& v) { v("model", model, "of a config.json"); }
};

// Limits and divisibility are those of a run's config.
ModelConfig checked_model(const json& options, const std::string& source) {
  const auto section = config_from_json<ModelSection>(json{{"model", options}}.dump(), source, ExitCode::usage);
  ConfigReport report;
  section.model.validate(report);
  try {
    report.throw_if_failed();
  } catch (const Error& error) {
    fail(ExitCode::usage, source, ": ", error.what());
  }
  return section.model;
}

json parsed_config(std::string_view content, const std::string& source) {
  json config = parse_strict_json(content, source);
  require(config.is_object(), ExitCode::data, source, ": must be a JSON object");
  return config;
}

}  // namespace

const char* family_name(Family family) { return name_of(family).type; }
const char* family_architecture(Family family) { return name_of(family).architecture; }

FamilyConfig read_family_config(std::string_view content, const std::string& source) {
  const json config = parsed_config(content, source);
  FamilyKeys keys(config, source);
  ignore_neutral(keys);
  FamilyConfig out{.family = family_named(keys, source)};
  out.dtype = dtype_of(keys);
  const json options = out.family == Family::gpt2      ? gpt2_options(keys)
                       : out.family == Family::gpt_oss ? gpt_oss_options(keys, source)
                                                       : rms_options(keys, source, out.family);
  keys.require_all_known();
  if (keys.has("quantization_config")) out.quantization = keys.value("quantization_config").dump();
  out.model = checked_model(options, source);
  return out;
}

SpecialTokens read_special_tokens(std::string_view content, const std::string& source) {
  const json config = parsed_config(content, source);
  const auto tokens = [&](const char* name) -> std::string {
    const auto found = config.find(name);
    if (found == config.end() || found->is_null()) return "";
    const bool list = found->is_array() && std::ranges::all_of(*found, [](const json& id) { return id.is_number_integer(); });
    require(found->is_number_integer() || list, ExitCode::data, source, ": ", name, " must be a token id or a list of them");
    return found->dump();
  };
  return {.begin = tokens("bos_token_id"), .end = tokens("eos_token_id"), .pad = tokens("pad_token_id")};
}

}  // namespace mantissa
