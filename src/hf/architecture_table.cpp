#include "hf/architecture_table.h"

#include <algorithm>
#include <iterator>

namespace mantissa {
namespace {

using enum KeyKind;

// Sets of architectures.
constexpr unsigned bit(Architecture architecture) { return 1U << static_cast<unsigned>(architecture); }
constexpr unsigned kLlama = bit(Architecture::llama), kQwen2 = bit(Architecture::qwen2), kQwen3Dense = bit(Architecture::qwen3),
                   kQwen3Moe = bit(Architecture::qwen3_moe), kMixtral = bit(Architecture::mixtral), kGpt2 = bit(Architecture::gpt2),
                   kGptOss = bit(Architecture::gpt_oss), kQwen3 = kQwen3Dense | kQwen3Moe, kQwen = kQwen2 | kQwen3,
                   kExperts = kQwen3Moe | kMixtral | kGptOss, kRms = kLlama | kQwen | kMixtral | kGptOss, kAll = kRms | kGpt2;

// In the order in which they are written.
constexpr ArchitectureKey kKeys[] = {
    // Options that some published files have and no class of these architectures reads.
    {kAll, must_be, "is_encoder_decoder", nullptr, false},
    {kAll, must_be, "add_cross_attention", nullptr, false},
    {kAll, must_be, "use_mrope", nullptr, false},
    {kAll, must_be, "rope_interleaved", nullptr, false},
    {kAll, must_be, "shared_expert_intermediate_size", nullptr, 0},
    {kLlama, must_be, "is_llama_config", nullptr, true},
    {kAll & ~kLlama, must_be, "is_llama_config", nullptr, false},
    {kQwen3, must_be, "use_qk_norm", nullptr, true},
    {kRms & ~kQwen3, must_be, "use_qk_norm", nullptr, false},
    {kQwen2 | kGptOss | kGpt2, must_be, "qkv_bias", nullptr, true},
    {kAll & ~(kQwen2 | kGptOss | kGpt2), must_be, "qkv_bias", nullptr, false},
    // How a model is run, saved, trained or prompted does not change the mathematics of a causal language model.
    {kAll, ignored,
     "_name_or_path _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash "
     "_experts_implementation _flash_attn_2_enabled _num_labels attention_dropout attn_implementation auto_map "
     "bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward classifier_dropout "
     "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping "
     "encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id "
     "forced_eos_token_id gradient_checkpointing id2label is_decoder label2id length_penalty max_length max_sequence_length "
     "min_length no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions "
     "output_hidden_states output_past output_router_logits output_scores pad_token_id prefix problem_type pruned_heads "
     "quantization_config remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id "
     "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p "
     "torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 "
     "use_cache xla_device"},
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
    {kLlama, must_be, "pretraining_tp", nullptr, 1},
    {kRms & ~kLlama, topic, nullptr, nullptr, {}, {}, read_windows, write_windows},
    {kGptOss, stated, "attention_bias", nullptr, true},
    {kGptOss, value, "swiglu_limit", "swiglu_limit", 7.0},
    {kGptOss, must_be, "swiglu_alpha", nullptr, 1.702},
    {kQwen3Moe, value, "num_experts_per_tok", "moe.num_experts_per_tok", 8},
    {kMixtral, value, "num_experts_per_tok", "moe.num_experts_per_tok", 2},
    {kGptOss, value, "num_experts_per_tok", "moe.num_experts_per_tok", 4},
    {kExperts, value, "router_aux_loss_coef", "moe.aux_loss_coef", 0.001},
    {kExperts, written, "output_router_logits", nullptr, false},
    {kQwen3Moe, value, "num_experts", "moe.num_experts", 128},
    {kMixtral, value, "num_local_experts", "moe.num_experts", 8},
    {kGptOss, value, "num_local_experts", "moe.num_experts", 128},
    {kExperts, topic, nullptr, nullptr, {}, {}, read_number_of_experts},
    {kQwen3Moe, value, "moe_intermediate_size", "moe.intermediate_size", 768},
    {kMixtral | kGptOss, needed, "intermediate_size", "moe.intermediate_size"},
    {kQwen3Moe, value, "norm_topk_prob", "moe.norm_topk_prob", false},
    {kMixtral | kGptOss, implied, nullptr, "moe.norm_topk_prob", true},
    {kMixtral, must_be, "router_jitter_noise", nullptr, 0.0},
    {kGptOss, implied, nullptr, "moe.router_bias", true},
    {kGptOss, implied, nullptr, "moe.expert_mlp_bias", true},
    {kGptOss, topic, nullptr, nullptr, {}, {}, read_gpt_oss_router},
    {kQwen3Moe, topic, nullptr, nullptr, {}, {}, read_dense_layers, write_dense_layers},
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

}  // namespace mantissa
