// Converts the config.json of an architecture to a ModelConfig.
#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "hf/architecture_keys.h"
#include "hf/architecture_options.h"
#include "mantissa/hf/hugging_face.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

using nlohmann::json;

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

Architecture architecture_named(ArchitectureKeys& keys, const std::string& source) {
  const std::string type = keys.word("model_type", "");
  const auto found = std::ranges::find_if(kArchitectures, [&](const ArchitectureName& one) { return type == one.type; });
  require(found != kArchitectures.end(), ExitCode::usage, source, ": model_type \"", shortened(type), "\": mantissa knows ",
          joined(kArchitectures, ", ", [](const ArchitectureName& one) { return one.type; }));
  keys.only("architectures", {json::array({found->class_name})});
  return found->architecture;
}

// Lists keys that do not change the mathematics of a causal language model in any architecture: how it is run, saved, trained or prompted.
constexpr std::initializer_list<const char*> kNeutral = {"_name_or_path",
                                                         "_attn_implementation",
                                                         "_attn_implementation_autoset",
                                                         "_attn_implementation_internal",
                                                         "_commit_hash",
                                                         "_experts_implementation",
                                                         "_flash_attn_2_enabled",
                                                         "_num_labels",
                                                         "attention_dropout",
                                                         "attn_implementation",
                                                         "auto_map",
                                                         "bad_words_ids",
                                                         "begin_suppress_tokens",
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
                                                         "gradient_checkpointing",
                                                         "id2label",
                                                         "initializer_range",
                                                         "is_decoder",
                                                         "label2id",
                                                         "length_penalty",
                                                         "max_length",
                                                         "max_sequence_length",
                                                         "min_length",
                                                         "no_repeat_ngram_size",
                                                         "num_beam_groups",
                                                         "num_beams",
                                                         "num_labels",
                                                         "num_return_sequences",
                                                         "output_attentions",
                                                         "output_hidden_states",
                                                         "output_past",
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
                                                         "transformers.js_config",
                                                         "transformers_version",
                                                         "typical_p",
                                                         "unsloth_fixed",
                                                         "unsloth_version",
                                                         "use_bfloat16",
                                                         "use_cache",
                                                         "xla_device"};

void ignore_neutral(ArchitectureKeys& keys) {
  keys.ignore(kNeutral);
  keys.only("is_encoder_decoder", {false});
  keys.only("add_cross_attention", {false});
}

// Requires the usual values of options that some published files have and no class of these architectures reads.
void require_as_here(ArchitectureKeys& keys, Architecture architecture) {
  keys.only("use_mrope", {false});
  keys.only("rope_interleaved", {false});
  keys.only("is_llama_config", {architecture == Architecture::llama});
  keys.only("shared_expert_intermediate_size", {0});
  const bool qwen3 = architecture == Architecture::qwen3 || architecture == Architecture::qwen3_moe;
  if (architecture != Architecture::gpt2) keys.only("use_qk_norm", {qwen3});
  keys.only("qkv_bias",
            {architecture == Architecture::qwen2 || architecture == Architecture::gpt2 || architecture == Architecture::gpt_oss});
}

Dtype dtype_of(ArchitectureKeys& keys) {
  const std::string older = keys.word("torch_dtype", "float32"), dtype = keys.word("dtype", older);
  if (dtype == "bfloat16") return Dtype::bf16;
  if (dtype != "float32" && dtype != "float16")
    keys.refuse(keys.has("dtype") ? "dtype" : "torch_dtype", "mantissa knows bfloat16, float16 and float32");
  return Dtype::f32;
}

// Before anything is done for each of them.
int64_t layers_of(ArchitectureKeys& keys) {
  constexpr int64_t kMost = 10000;
  const int64_t layers = keys.needed_integer("num_hidden_layers");
  if (layers < 1 || layers > kMost) keys.refuse("num_hidden_layers", text("mantissa takes 1 to ", kMost));
  return layers;
}

// Returns the number of key and value heads, or the size of one; none: ModelConfig derives it from the query heads.
std::optional<int64_t> size_of_heads(ArchitectureKeys& keys, const char* name, const ClassDefault& of_class) {
  if (keys.is_null(name) && !of_class.null) keys.wrong(name, "an integer");
  return keys.has(name) || keys.is_null(name) ? keys.integer(name) : of_class.absent;
}

json common_options(ArchitectureKeys& keys, const std::string& source, Architecture architecture) {
  const ClassDefaults& defaults = class_defaults(architecture);
  json model = {{"vocab_size", keys.needed_integer("vocab_size")},
                {"hidden_size", keys.needed_integer("hidden_size")},
                {"num_layers", layers_of(keys)},
                {"num_attention_heads", keys.needed_integer("num_attention_heads")},
                {"intermediate_size", keys.needed_integer("intermediate_size")},
                {"max_position_embeddings", keys.integer_or("max_position_embeddings", defaults.positions)},
                {"norm", "rms"},
                {"position", "rope"},
                {"activation", "swiglu"},
                {"norm_eps", keys.number_or("rms_norm_eps", defaults.norm_eps)},
                {"tie_word_embeddings", keys.flag("tie_word_embeddings", false)}};
  if (const auto heads = size_of_heads(keys, "num_key_value_heads", defaults.kv_heads)) model["num_key_value_heads"] = *heads;
  if (const auto size = size_of_heads(keys, "head_dim", defaults.head_dim)) model["head_dim"] = *size;
  keys.only("hidden_act", {"silu"});
  read_rope(keys, source, architecture, model);
  if (architecture != Architecture::llama) read_windows(keys, architecture, model);  // its class has none
  return model;
}

json experts_of(ArchitectureKeys& keys, Architecture architecture) {
  const ClassDefaults& defaults = class_defaults(architecture);
  const std::optional<int64_t> local = keys.integer("num_local_experts"), plain = keys.integer("num_experts");
  if (local && plain && *local != *plain) keys.refuse("num_experts", text("num_local_experts is ", *local));
  for (const char* const name : {"num_local_experts", "num_experts"}) {
    if (keys.is_null(name)) keys.wrong(name, "an integer");
  }
  return {{"num_experts", local ? *local : plain.value_or(defaults.experts)},
          {"num_experts_per_tok", keys.integer_or("num_experts_per_tok", defaults.experts_per_token)},
          {"aux_loss_coef", keys.number_or("router_aux_loss_coef", 0.001)}};
}

// Layer i has experts unless it is listed in mlp_only_layers or decoder_sparse_step passes over it.
std::vector<int64_t> dense_layers(ArchitectureKeys& keys, int64_t layers) {
  const std::vector<int64_t> given = keys.integers("mlp_only_layers");
  const std::set<int64_t> listed(given.begin(), given.end());
  const int64_t step = keys.integer_or("decoder_sparse_step", 1);
  if (step < 1) keys.wrong("decoder_sparse_step", "1 or more");
  std::vector<int64_t> dense;
  for (int64_t i = 0; i < layers; ++i) {
    if (listed.contains(i) || (i + 1) % step != 0) dense.push_back(i);
  }
  return dense;
}

json rms_options(ArchitectureKeys& keys, const std::string& source, Architecture architecture) {
  json model = common_options(keys, source, architecture);
  const bool qwen3 = architecture == Architecture::qwen3 || architecture == Architecture::qwen3_moe;
  model["qk_norm"] = qwen3;
  if (architecture == Architecture::qwen2) model["attention_bias"] = "qkv";
  if (architecture == Architecture::llama || qwen3) model["attention_bias"] = keys.flag("attention_bias", false) ? "all" : "none";
  if (architecture == Architecture::llama) {
    model["mlp_bias"] = keys.flag("mlp_bias", false);
    keys.only("pretraining_tp", {1});
  }
  if (architecture == Architecture::mixtral) {
    json moe = experts_of(keys, architecture);
    moe["intermediate_size"] = model["intermediate_size"];
    moe["norm_topk_prob"] = true;
    keys.only("router_jitter_noise", {0.0, 0});
    model["moe"] = std::move(moe);
  }
  if (architecture == Architecture::qwen3_moe) {
    json moe = experts_of(keys, architecture);
    if (moe["num_experts"] == 0) fail(ExitCode::usage, source, ": num_experts: a qwen3_moe without experts; write it as qwen3");
    moe["intermediate_size"] = keys.integer_or("moe_intermediate_size", 768);
    moe["norm_topk_prob"] = keys.flag("norm_topk_prob", false);
    const auto layers = model["num_layers"].get<int64_t>();
    const std::vector<int64_t> dense = dense_layers(keys, layers);
    moe["dense_layers"] = dense;
    if (std::cmp_less(dense.size(), layers)) model["moe"] = std::move(moe);
  }
  return model;
}

json gpt_oss_options(ArchitectureKeys& keys, const std::string& source) {
  json model = common_options(keys, source, Architecture::gpt_oss);
  keys.only("attention_bias", {true});
  keys.only("swiglu_alpha", {1.702});
  keys.ignore({"initial_context_length", "experts_per_token"});
  json moe = experts_of(keys, Architecture::gpt_oss);
  moe.update({{"intermediate_size", model["intermediate_size"]},
              {"softmax_after_topk", true},
              {"norm_topk_prob", true},
              {"router_bias", true},
              {"expert_mlp_bias", true}});
  model.update({{"qk_norm", false},
                {"attention_bias", "all"},
                {"attention_sinks", true},
                {"activation", "swiglu_clamped"},
                {"swiglu_limit", keys.number_or("swiglu_limit", 7.0)},
                {"moe", std::move(moe)}});
  return model;
}

json gpt2_options(ArchitectureKeys& keys) {
  const int64_t hidden = keys.needed_integer("n_embd");
  const std::map<std::string, std::string> activations = {
      {"gelu_new", "gelu_tanh"}, {"gelu_pytorch_tanh", "gelu_tanh"}, {"gelu", "gelu_erf"}};
  const std::string activation = keys.word("activation_function", "gelu_new");
  if (!activations.contains(activation)) keys.refuse("activation_function", "mantissa knows gelu_new, gelu_pytorch_tanh and gelu");
  keys.ignore({"n_ctx", "n_special", "predict_special_tokens", "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn",
               "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"});
  const int64_t heads = keys.needed_integer("n_head");
  if (heads > 0 && hidden % heads != 0) keys.refuse("n_embd", text("must be a multiple of n_head ", heads));
  keys.only("scale_attn_weights", {true});
  keys.only("scale_attn_by_inverse_layer_idx", {false});
  return {{"vocab_size", keys.needed_integer("vocab_size")},
          {"hidden_size", hidden},
          {"num_layers", keys.needed_integer("n_layer")},
          {"num_attention_heads", heads},
          {"intermediate_size", keys.integer("n_inner").value_or(hidden > INT64_MAX / 4 ? hidden : 4 * hidden)},
          {"max_position_embeddings", keys.integer_or("n_positions", 1024)},
          {"norm", "layer"},
          {"norm_bias", true},
          {"norm_eps", keys.number_or("layer_norm_epsilon", 1e-5)},
          {"position", "learned"},
          {"activation", activations.at(activation)},
          {"attention_bias", "all"},
          {"mlp_bias", true},
          {"qk_norm", false},
          {"tie_word_embeddings", keys.flag("tie_word_embeddings", true)}};
}

json parsed_config(std::string_view content, const std::string& source) {
  json config = parse_strict_json(content, source);
  require(config.is_object(), ExitCode::data, source, ": must be a JSON object");
  return config;
}

}  // namespace

const char* architecture_name(Architecture architecture) { return name_of(architecture).type; }
const char* architecture_class(Architecture architecture) { return name_of(architecture).class_name; }

ArchitectureConfig read_architecture_config(std::string_view content, const std::string& source) {
  const json config = parsed_config(content, source);
  ArchitectureKeys keys(config, source);
  ignore_neutral(keys);
  ArchitectureConfig out{.architecture = architecture_named(keys, source)};
  require_as_here(keys, out.architecture);
  out.dtype = dtype_of(keys);
  out.says_dtype = keys.has("dtype") || keys.has("torch_dtype");
  const json options = out.architecture == Architecture::gpt2      ? gpt2_options(keys)
                       : out.architecture == Architecture::gpt_oss ? gpt_oss_options(keys, source)
                                                                   : rms_options(keys, source, out.architecture);
  keys.require_all_known();
  if (keys.has("quantization_config")) out.quantization = keys.value("quantization_config").dump();
  out.model = architecture_model(options, keys, out.architecture, source);
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
