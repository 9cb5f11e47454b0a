#include "hf/architecture_table.h"

#include <algorithm>
#include <iterator>

#include "json/json_fields.h"

namespace mantissa {
namespace {

using enum KeyKind;

using namespace architectures;

constexpr const char* kNoDropout = "is not applied: training here drops nothing";

// Keys in the order in which they are written.
constexpr ArchitectureKey kKeys[] = {
    // Options that some published files have and no class of these architectures reads.
    {kAll, must_be, "is_encoder_decoder", nullptr, false},
    {kAll, must_be, "add_cross_attention", nullptr, false},
    {kAll, must_be, "use_mrope", nullptr, false},
    {kAll, must_be, "rope_interleaved", nullptr, false},
    {kAll, must_be, "shared_expert_intermediate_size", nullptr, 0},
    // Keys of training that a class reads, and that stand in files of others, too.
    {kAll, must_be, "pretraining_tp", nullptr, 1},
    {kAll, must_be, "router_jitter_noise", nullptr, 0.0},
    {kAll, training, "attention_dropout", kNoDropout, 0.0},
    {kAll, training, "attn_pdrop", kNoDropout, 0.0},
    {kAll, training, "embd_pdrop", kNoDropout, 0.0},
    {kAll, training, "resid_pdrop", kNoDropout, 0.0},
    {kLlama, must_be, "is_llama_config", nullptr, true},
    {kAll & ~kLlama, must_be, "is_llama_config", nullptr, false},
    {kQwen3, must_be, "use_qk_norm", nullptr, true},
    {kRms & ~kQwen3, must_be, "use_qk_norm", nullptr, false},
    {kQwen2 | kGptOss | kGpt2, must_be, "qkv_bias", nullptr, true},
    {kAll & ~(kQwen2 | kGptOss | kGpt2), must_be, "qkv_bias", nullptr, false},
    // These keys tell how a model is run, saved or prompted, which does not change the mathematics of a causal language model. Keys of
    // training that nobody could miss are among them: gradient_checkpointing spends time for memory, and dropout of classifiers is none of
    // a language model.
    {kAll, ignored,
     "_name_or_path _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash "
     "_experts_implementation _flash_attn_2_enabled _num_labels attn_implementation auto_map "
     "bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout "
     "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping "
     "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id "
     "forced_eos_token_id gradient_checkpointing id2label is_decoder label2id length_penalty max_length max_sequence_length "
     "min_length no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions "
     "output_hidden_states output_past output_scores pad_token_id prefix problem_type pruned_heads "
     "quantization_config remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id "
     "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p "
     "torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 "
     "use_cache xla_device"},
    {kAll & ~kExperts, ignored, "output_router_logits"},
    {kGptOss, ignored, "initial_context_length experts_per_token"},
    {kGpt2, ignored,
     "reorder_and_upcast_attn n_special predict_special_tokens summary_activation summary_first_dropout "
     "summary_proj_to_labels summary_type summary_use_proj"},
    // Sizes and options.
    {kAll, needed, "vocab_size", "vocab_size"},
    {kRms, implied, nullptr, "norm", "rms"},
    {kRms, implied, nullptr, "position", "rope"},
    {kRms & ~kGptOss, implied, nullptr, "activation", "swiglu"},
    {kGptOss, implied, nullptr, "activation", "swiglu_clamped"},
    {kQwen3, implied, nullptr, "qk_norm", true},
    {kAll & ~kQwen3, implied, nullptr, "qk_norm", false},
    {kQwen2, implied, nullptr, "attention_bias", "qkv"},
    {kGptOss | kGpt2, implied, nullptr, "attention_bias", "all"},
    {kGptOss, implied, nullptr, "attention_sinks", true},
    {kRms, stated, "hidden_act", nullptr, "silu"},
    {kRms, needed, "hidden_size", "hidden_size"},
    {kRms, needed, "intermediate_size", "intermediate_size"},
    {kRms, needed, "num_hidden_layers", "num_layers"},
    {kRms, needed, "num_attention_heads", "num_attention_heads"},
    {kLlama, nullable, "num_key_value_heads", "num_key_value_heads"},
    {kQwen2 | kQwen3Dense, nullable, "num_key_value_heads", "num_key_value_heads", 32},
    {kQwen3Moe, value, "num_key_value_heads", "num_key_value_heads", 4},
    {kMixtral | kGptOss, nullable, "num_key_value_heads", "num_key_value_heads", 8},
    {kLlama, value, "max_position_embeddings", "max_position_embeddings", 2048},
    {kQwen, value, "max_position_embeddings", "max_position_embeddings", 32768},
    {kMixtral | kGptOss, value, "max_position_embeddings", "max_position_embeddings", 131072},
    {kLlama | kQwen, value, "rms_norm_eps", "norm_eps", 1e-6},
    {kMixtral | kGptOss, value, "rms_norm_eps", "norm_eps", 1e-5},
    {kLlama | kQwen, lenient, "rope_theta", "rope_theta", 1e4},
    {kMixtral, lenient, "rope_theta", "rope_theta", 1e6},
    {kGptOss, lenient, "rope_theta", "rope_theta", 150000.0},
    {kRms, written, "initializer_range", "init_std"},
    {kRms, must_be, "partial_rotary_factor", nullptr, 1.0},
    {kRms, topic, nullptr, nullptr, {}, {}, read_rope, write_rope},
    {kLlama | kMixtral, nullable, "head_dim", "head_dim"},
    {kQwen2 | kQwen3Moe, value, "head_dim", "head_dim"},
    {kQwen3Dense, value, "head_dim", "head_dim", 128},
    {kGptOss, nullable, "head_dim", "head_dim", 64},
    {kLlama | kQwen3, value, "attention_bias", "attention_bias", false, {{{false, "none"}, {true, "all"}}}},
    {kLlama, value, "mlp_bias", "mlp_bias", false},
    {kRms & ~kLlama, topic, nullptr, nullptr, {}, {}, read_windows, write_windows},
    {kGptOss, stated, "attention_bias", nullptr, true},
    {kGptOss, value, "swiglu_limit", "swiglu_limit", 7.0},
    {kGptOss, must_be, "swiglu_alpha", nullptr, 1.702},
    {kQwen3Moe, value, "num_experts_per_tok", "moe.num_experts_per_tok", 8},
    {kMixtral, value, "num_experts_per_tok", "moe.num_experts_per_tok", 2},
    {kGptOss, value, "num_experts_per_tok", "moe.num_experts_per_tok", 4},
    {kQwen3Moe, value, "num_experts", "moe.num_experts", 128},
    {kMixtral, value, "num_local_experts", "moe.num_experts", 8},
    {kGptOss, value, "num_local_experts", "moe.num_experts", 128},
    {kExperts, topic, nullptr, nullptr, {}, {}, read_number_of_experts},
    {kQwen3Moe, value, "moe_intermediate_size", "moe.intermediate_size", 768},
    {kMixtral | kGptOss, needed, "intermediate_size", "moe.intermediate_size"},
    {kQwen3Moe, value, "norm_topk_prob", "moe.norm_topk_prob", false},
    {kMixtral | kGptOss, implied, nullptr, "moe.norm_topk_prob", true},
    {kGptOss, implied, nullptr, "moe.router_bias", true},
    {kGptOss, implied, nullptr, "moe.expert_mlp_bias", true},
    {kGptOss, topic, nullptr, nullptr, {}, {}, read_gpt_oss_router},
    {kQwen3Moe, topic, nullptr, nullptr, {}, {}, read_dense_layers, write_dense_layers},
    {kExperts, topic, nullptr, nullptr, {}, {}, read_router_loss},
    {kGpt2, implied, nullptr, "norm", "layer"},
    {kGpt2, implied, nullptr, "norm_bias", true},
    {kGpt2, implied, nullptr, "position", "learned"},
    {kGpt2, implied, nullptr, "mlp_bias", true},
    {kGpt2,
     lenient,
     "activation_function",
     "activation",
     "gelu_new",
     {{{"gelu_new", "gelu_tanh"}, {"gelu_pytorch_tanh", "gelu_tanh"}, {"gelu", "gelu_erf"}}}},
    {kGpt2, needed, "n_embd", "hidden_size"},
    {kGpt2, needed, "n_layer", "num_layers"},
    {kGpt2, needed, "n_head", "num_attention_heads"},
    {kGpt2, nullable, "n_inner", "intermediate_size"},
    {kGpt2, topic, nullptr, nullptr, {}, {}, read_gpt2_width},
    {kGpt2, value, "n_positions", "max_position_embeddings", 1024},
    {kGpt2, written, "n_ctx", "max_position_embeddings"},
    {kGpt2, value, "layer_norm_epsilon", "norm_eps", 1e-5},
    {kGpt2, written, "initializer_range", "init_std"},
    {kGpt2, written, "attn_pdrop", nullptr, 0.0},
    {kGpt2, written, "embd_pdrop", nullptr, 0.0},
    {kGpt2, written, "resid_pdrop", nullptr, 0.0},
    {kGpt2, must_be, "scale_attn_weights", nullptr, true},
    {kGpt2, must_be, "scale_attn_by_inverse_layer_idx", nullptr, false},
    {kRms, value, "tie_word_embeddings", "tie_word_embeddings", false},
    {kGpt2, value, "tie_word_embeddings", "tie_word_embeddings", true},
};

}  // namespace

ArchitectureTable architecture_table(Architecture architecture) {
  ArchitectureTable table;
  std::ranges::copy_if(kKeys, std::back_inserter(table),
                       [&](const ArchitectureKey& key) { return (key.architectures & bit(architecture)) != 0; });
  return table;
}

// Reads and writes topics.

namespace {

// Members of rope_scaling, which are named alike in section "model.rope_scaling".
std::vector<std::string> scaling_keys(RopeScaling type) {
  if (type == RopeScaling::llama3) return {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"};
  return {"factor",        "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
          "mscale_all_dim"};
}

void read_scaling(ArchitectureReader& reader, ArchitectureKeys& rope, RopeScaling type) {
  const int64_t longest = reader.model.max_position_embeddings;
  RopeScalingConfig& scaling = reader.model.rope_scaling.emplace();
  scaling.type = type;
  scaling.original_max_position_embeddings = longest;
  for (const std::string& key : scaling_keys(type)) {
    const std::string option = "rope_scaling." + key;
    const Json* const stated = rope.stated(key, option_field(reader.model, option).kind());
    reader.set(option, rope.name(key), stated != nullptr ? *stated : Json());
  }
  reader.set("rope_scaling.type", rope.name("rope_type"), choice_name(type));
  if (type == RopeScaling::yarn && rope.is_null("factor")) {
    const auto original = static_cast<double>(scaling.original_max_position_embeddings);
    return reader.set("rope_scaling.factor", rope.name("factor"), static_cast<double>(longest) / original);
  }
  rope.require_present("factor");
  if (type == RopeScaling::yarn) return;
  rope.require_present("low_freq_factor");
  rope.require_present("high_freq_factor");
}

std::vector<int64_t> layers_by_type(ArchitectureKeys& keys, int64_t layers) {
  const Json& types = keys.value("layer_types");
  const bool known = types.is_list() && std::cmp_equal(types.size(), layers) && std::ranges::all_of(types.entries(), [](const Json& type) {
                       return type == "full_attention" || type == "sliding_attention";
                     });
  if (!known) keys.refuse("layer_types", "mantissa knows \"full_attention\" and \"sliding_attention\", one for each layer");
  std::vector<int64_t> sliding;
  for (int64_t i = 0; i < layers; ++i) {
    if (types.at(static_cast<size_t>(i)) == "sliding_attention") sliding.push_back(i);
  }
  return sliding;
}

// Returns true if the classes of the architecture have windows in all layers or none.
bool layers_alike(Architecture architecture) { return architecture == Architecture::mixtral || architecture == Architecture::qwen3_moe; }

}  // namespace

// transformers 4 writes rope_theta and rope_scaling, 5 writes both in rope_parameters.
void read_rope(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  const bool empty = keys.is_null("rope_scaling") || (keys.has("rope_scaling") && keys.value("rope_scaling") == Json(Json::Members()));
  if (reader.architecture == Architecture::gpt_oss && empty && !keys.has("rope_parameters"))
    keys.refuse("rope_scaling",
                "transformers 4 takes this as unscaled and transformers 5 as yarn; write {\"rope_type\": \"default\"} or the scaling");
  std::optional<double> theta = keys.number("rope_theta");
  std::optional<std::string> before;
  for (const std::string name : {"rope_scaling", "rope_parameters"}) {
    if (!keys.has(name)) continue;
    ArchitectureKeys rope(keys.value(name), keys.source(), name + ".");
    const std::optional<double> inner = rope.number("rope_theta");
    rope.only("partial_rotary_factor", {1.0});
    reader.model.rope_scaling.reset();
    const std::string word = rope.word("rope_type", rope.word("type", "default"));
    if (rope.word("type", word) != word) rope.refuse("type", "rope_type is \"" + word + "\"");
    const std::optional<RopeScaling> type = choice_of<RopeScaling>(word);
    if (!type && word != "default") rope.refuse(rope.has("rope_type") ? "rope_type" : "type", "mantissa knows default, llama3 and yarn");
    if (type) read_scaling(reader, rope, *type);
    rope.require_all_known();
    if (theta && inner && *theta != *inner) keys.refuse(name, text("rope_theta differs: ", *theta, " stands beside it"));
    if (inner && !theta) reader.set("rope_theta", rope.name("rope_theta"), *inner);
    if (inner) theta = inner;
    const std::string scaling = json_text(reader.model.rope_scaling);
    if (before && *before != scaling) keys.refuse(name, "rope_scaling says otherwise");
    before = scaling;
  }
  if (!before && reader.architecture == Architecture::gpt_oss)  // whose class scales by default
    reader.model.rope_scaling = {.type = RopeScaling::yarn,
                                 .factor = 32.0,
                                 .original_max_position_embeddings = 4096,
                                 .beta_fast = 32.0,
                                 .beta_slow = 1.0,
                                 .truncate = false};
}

void write_rope(Architecture architecture, ModelConfig& model, Json& out) {
  if (model.rope_scaling) {
    Json& rope = out.add("rope_scaling", {{"rope_type", choice_name(model.rope_scaling->type)}});
    for (const std::string& key : scaling_keys(model.rope_scaling->type)) {
      const Json value = json_of(option_field(model, "rope_scaling." + key).get());
      if (!value.is_null()) rope.add(key, value);
    }
  } else if (architecture == Architecture::gpt_oss) {
    out.add("rope_scaling", {{"rope_type", "default"}});  // without it it is yarn
  }
}

// Reads which layers see only the last tokens: by layer_types, else all of Mixtral's, and of Qwen's those from max_window_layers on.
void read_windows(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  const bool mixtral = reader.architecture == Architecture::mixtral, gpt_oss = reader.architecture == Architecture::gpt_oss;
  const std::optional<int64_t> stated = keys.integer("sliding_window");
  const int64_t window = stated.value_or(gpt_oss ? 128 : 4096);
  bool windowed = stated || (!mixtral && !keys.is_null("sliding_window"));  // else all tokens are seen, or no layer says otherwise
  if (!mixtral && !gpt_oss) {
    keys.require_not_null("use_sliding_window", FieldKind::boolean);
    const Json* const used = keys.stated("use_sliding_window", FieldKind::boolean);
    if (used == nullptr || *used == false) windowed = false;
  }
  const bool later = reader.architecture == Architecture::qwen2 || reader.architecture == Architecture::qwen3;
  if (later && windowed) keys.require_not_null("max_window_layers", FieldKind::integer);
  const int64_t first = keys.integer("max_window_layers").value_or(28);
  std::vector<int64_t> sliding;
  for (int64_t i = 0; i < reader.layers(); ++i) {
    if (gpt_oss ? i % 2 == 0 : windowed && (!later || i >= first)) sliding.push_back(i);
  }
  const bool typed = keys.has("layer_types");
  if (typed) {
    const std::vector<int64_t> by_type = layers_by_type(keys, reader.layers());
    if (layers_alike(reader.architecture) && by_type != sliding)
      keys.refuse("layer_types", "layers of this architecture are all alike, by sliding_window");
    sliding = by_type;
  }
  if (sliding.empty()) return;
  if (!windowed && typed) keys.refuse("layer_types", "there is no sliding_window");
  if (!windowed) keys.refuse("sliding_window", "every second layer of gpt-oss has one, unless layer_types says otherwise");
  reader.set("sliding_window", "sliding_window", window);
  if (std::cmp_less(sliding.size(), reader.layers())) reader.model.sliding_layers = sliding;
}

void write_windows(Architecture architecture, ModelConfig& model, Json& out) {
  const bool qwen = architecture != Architecture::mixtral && architecture != Architecture::gpt_oss;
  if (qwen) out.add("use_sliding_window", model.sliding_window.has_value());
  const bool stated = architecture == Architecture::gpt_oss;  // must be there, though no layer slides
  out.add("sliding_window", model.sliding_window || !stated ? Json(model.sliding_window) : 128);
  if (layers_alike(architecture) || (!model.sliding_window && architecture != Architecture::gpt_oss)) return;
  std::vector<std::string> types;
  for (int64_t i = 0; i < model.num_layers; ++i) types.emplace_back(model.window(i) > 0 ? "sliding_attention" : "full_attention");
  out.add("layer_types", types);
  if (qwen) out.add("max_window_layers", 0);
}

// Some files have the name of another architecture.
void read_number_of_experts(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  const std::optional<int64_t> local = keys.integer("num_local_experts"), plain = keys.integer("num_experts");
  if (local && plain && *local != *plain) keys.refuse("num_experts", text("num_local_experts is ", *local));
  for (const char* const key : {"num_local_experts", "num_experts"}) {
    keys.require_not_null(key, FieldKind::integer);
    if (keys.has(key)) reader.set("moe.num_experts", key, keys.value(key));
  }
}

// Layer i has experts unless it is listed in mlp_only_layers or decoder_sparse_step passes over it.
void read_dense_layers(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  for (const char* const key : {"num_local_experts", "num_experts"}) {
    if (keys.has(key) && keys.value(key) == 0)
      fail(ExitCode::usage, keys.source(), ": num_experts: a qwen3_moe without experts; write it as qwen3");
  }
  const Json* const given = keys.stated("mlp_only_layers", FieldKind::list);
  const auto listed = given != nullptr ? JsonReader(*given, keys.source(), keys.name("mlp_only_layers")).as<std::vector<int64_t>>()
                                       : std::vector<int64_t>();
  const int64_t step = keys.integer_or("decoder_sparse_step", 1);
  if (step < 1) keys.wrong("decoder_sparse_step", "1 or more");
  for (int64_t i = 0; i < reader.layers(); ++i) {
    if (std::ranges::find(listed, i) != listed.end() || (i + 1) % step != 0) reader.model.moe->dense_layers.push_back(i);
  }
  if (std::cmp_equal(reader.model.moe->dense_layers.size(), reader.layers())) reader.drop_experts();
}

void write_dense_layers(Architecture, ModelConfig& model, Json& out) {
  out.add("decoder_sparse_step", 1);
  out.add("mlp_only_layers", model.moe->dense_layers);
}

// Published files have a coefficient beside output_router_logits false, and then no trainer of transformers adds the loss.
void read_router_loss(ArchitectureReader& reader) {
  constexpr const char* kKey = "router_aux_loss_coef";
  constexpr double kDefault = 0.001;  // default of the classes
  ArchitectureKeys& keys = reader.keys;
  keys.require_not_null(kKey, FieldKind::number);
  const double coefficient = keys.number(kKey).value_or(kDefault);
  const Json* const asked = keys.stated("output_router_logits", FieldKind::boolean);
  if (!reader.model.moe) return;
  reader.set("moe.aux_loss_coef", kKey, coefficient);
  const int64_t layers = reader.layers() - std::ssize(reader.model.moe->dense_layers), chosen = reader.model.moe->num_experts_per_tok;
  if (asked == nullptr || *asked == false) {
    reader.set("moe.aux_loss_coef", kKey, 0.0);
    if (coefficient == 0.0 || !keys.has(kKey)) return;
    return reader.say(kKey,
                      "is not taken, because output_router_logits is not true and transformers adds no loss then: "
                      "model.moe.aux_loss_coef is 0 unless --set gives it");
  }
  const double here = coefficient * static_cast<double>(chosen) / static_cast<double>(layers);
  reader.set("moe.aux_loss_coef", kKey, here);
  reader.say(kKey, text("is model.moe.aux_loss_coef ", here, " in each layer: transformers sums over ", chosen,
                        " experts of a token and takes ", count_text(layers, "layer"), " at once"));
}

// Weights of gpt-oss are a softmax over the chosen logits, which needs more than one expert.
void read_gpt_oss_router(ArchitectureReader& reader) { reader.set("moe.softmax_after_topk", "num_experts_per_tok", true); }

void read_gpt2_width(ArchitectureReader& reader) {
  ArchitectureKeys& keys = reader.keys;
  const int64_t heads = keys.integer("n_head").value_or(0), width = keys.integer("n_embd").value_or(0);
  if (heads > 0 && width % heads != 0) keys.refuse("n_embd", text("must be a multiple of n_head ", heads));
  if (!keys.has("n_inner")) reader.model.intermediate_size = 4 * reader.model.hidden_size;
}

}  // namespace mantissa
