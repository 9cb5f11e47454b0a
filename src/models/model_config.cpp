#include "mantissa/models/model_config.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "mantissa/base/integers.h"

namespace mantissa {

namespace {

// Layers that are there, each once.
void validate_layers(const std::vector<int64_t>& layers, int64_t num_layers, const std::string& key, const OptionError& report) {
  std::set<int64_t> seen;
  for (const int64_t layer : layers) {
    if (layer < 0 || layer >= num_layers) report(key, text("there is no layer ", layer, ", model.num_layers is ", num_layers));
    if (!seen.insert(layer).second) report(key, text("names layer ", layer, " twice"));
  }
}

}  // namespace

int64_t ModelConfig::padded_vocab_size() const {
  require(vocab_size.has_value(), "model.vocab_size is not known yet");
  return round_up(*vocab_size, pad_vocab_to);
}

void ModelConfig::validate(ConfigReport& report) const {
  validate([&](const std::string& key, const std::string& why) { report.error(key, why); });
}

void ModelConfig::validate(const OptionError& report) const {
  if (!head_dim && hidden_size % num_attention_heads != 0) {
    report("model.hidden_size",
           text("must be a multiple of num_attention_heads ", num_attention_heads, " unless head_dim is given, got ", hidden_size));
  } else if (position == Position::rope && head_size() % 2 != 0) {
    report(head_dim ? "model.head_dim" : "model.hidden_size",
           text("rotary positions need an even head_dim, got ", head_size(), head_dim ? "" : " = hidden_size / num_attention_heads"));
  }
  if (num_attention_heads % kv_heads() != 0)
    report("model.num_key_value_heads", text("must divide num_attention_heads ", num_attention_heads, ", got ", kv_heads()));
  if (num_attention_heads * head_size() > kWidestHeads) {
    report("model.num_attention_heads",
           text("num_attention_heads ", num_attention_heads, " * head_dim ", head_size(), " is more than ", kWidestHeads));
  }
  validate_layers(sliding_layers, num_layers, "model.sliding_layers", report);
  if (!sliding_layers.empty() && !sliding_window) report("model.sliding_layers", "needs model.sliding_window");
  if (swiglu_limit && activation != Activation::swiglu_clamped) report("model.swiglu_limit", "needs model.activation swiglu_clamped");
  if (rope_scaling) rope_scaling->validate(*this, report);
  if (moe) moe->validate(*this, report);
  if (norm_bias && norm == Norm::rms) report("model.norm_bias", "needs model.norm layer, because RMSNorm has no bias");
}

void RopeScalingConfig::validate(const ModelConfig& model, const OptionError& report) const {
  if (model.position != Position::rope) return report("model.rope_scaling", "needs model.position rope");
  const auto refuse = [&](bool wrong, const char* key, const std::string& why) {
    if (wrong) report(std::string("model.rope_scaling.") + key, why);
  };
  const bool yarn = type == RopeScaling::yarn;
  const auto only = [&](RopeScaling of, const char* key, bool given) {
    refuse(given && type != of, key, text("needs model.rope_scaling.type ", choice_name(of), ", got ", choice_name(type)));
  };
  only(RopeScaling::llama3, "low_freq_factor", low_freq_factor.has_value());
  only(RopeScaling::llama3, "high_freq_factor", high_freq_factor.has_value());
  only(RopeScaling::yarn, "beta_fast", beta_fast.has_value());
  only(RopeScaling::yarn, "beta_slow", beta_slow.has_value());
  only(RopeScaling::yarn, "truncate", truncate.has_value());
  only(RopeScaling::yarn, "attention_factor", attention_factor.has_value());
  only(RopeScaling::yarn, "mscale", mscale.has_value());
  only(RopeScaling::yarn, "mscale_all_dim", mscale_all_dim.has_value());
  const double low = low_freq_factor.value_or(1.0), high = high_freq_factor.value_or(4.0);
  refuse(!yarn && high <= low, "high_freq_factor", text("must be above low_freq_factor ", low, ", got ", high));
  const double fast = beta_fast.value_or(32.0), slow = beta_slow.value_or(1.0);
  refuse(yarn && fast <= slow, "beta_fast", text("must be above beta_slow ", slow, ", got ", fast));
  refuse(yarn && mscale.has_value() != mscale_all_dim.has_value(), mscale ? "mscale" : "mscale_all_dim",
         "mscale and mscale_all_dim must be given together");
  refuse(yarn && mscale && attention_factor, "mscale", "has no effect beside attention_factor: remove one of them");
  if (yarn && model.rope_theta <= 1.0) {
    report("model.rope_theta", text("must be above 1 for model.rope_scaling.type yarn, got ", model.rope_theta));
  }
}

bool ModelConfig::has_experts(int64_t layer) const { return moe && std::ranges::find(moe->dense_layers, layer) == moe->dense_layers.end(); }

int64_t ModelConfig::expert_layers() const {
  int64_t count = 0;
  for (int64_t layer = 0; layer < num_layers; ++layer) count += has_experts(layer) ? 1 : 0;
  return count;
}

int64_t ModelConfig::window(int64_t layer) const {
  const bool slides = sliding_layers.empty() || std::ranges::find(sliding_layers, layer) != sliding_layers.end();
  return slides ? sliding_window.value_or(0) : 0;
}

// Softmax over the chosen logits is the scores of the chosen divided by their sum, and stays finite where these vanish.
RoutingRule MoeConfig::rule() const {
  const bool divides = norm_topk_prob.value_or(num_experts_per_tok > 1), softmax = score == RouterScore::softmax;
  return {.top_k = num_experts_per_tok,
          .score = score,
          .softmax_after_topk = softmax_after_topk || (softmax && divides),
          .renormalize = !softmax && divides,
          .scale = routed_scaling_factor,
          .groups = n_group,
          .groups_kept = topk_group,
          .forced = force_balance};
}

int64_t MoeConfig::capacity(int64_t tokens) const {
  if (!capacity_factor) return 0;
  const double even = static_cast<double>(tokens * num_experts_per_tok) / static_cast<double>(num_experts);
  return std::max<int64_t>(1, static_cast<int64_t>(std::min(std::ceil(even * *capacity_factor), static_cast<double>(tokens))));
}

void MoeConfig::validate(const ModelConfig& model, const OptionError& report) const {
  const auto refuse = [&](bool wrong, const char* key, const std::string& why) {
    if (wrong) report(std::string("model.moe.") + key, why);
  };
  refuse(num_experts_per_tok > num_experts, "num_experts_per_tok",
         text("must be at most num_experts ", num_experts, ", got ", num_experts_per_tok));
  if (num_experts_per_tok > num_experts) return;
  refuse(num_experts % n_group != 0, "n_group", text("must divide num_experts ", num_experts, ", got ", n_group));
  refuse(topk_group > n_group, "topk_group", text("must be at most n_group ", n_group, ", got ", topk_group));
  refuse(topk_group <= n_group && topk_group * (num_experts / n_group) < num_experts_per_tok, "topk_group",
         text(count_text(topk_group, "group"), " of ", num_experts / n_group, " experts have fewer than num_experts_per_tok ",
              num_experts_per_tok));
  refuse(softmax_after_topk && score != RouterScore::softmax, "softmax_after_topk", "needs model.moe.score softmax");
  refuse(softmax_after_topk && num_experts_per_tok == 1, "softmax_after_topk",
         "with num_experts_per_tok 1 every weight is 1 and the router learns nothing from the loss");
  refuse(has_expert_bias() && score != RouterScore::sigmoid, "bias_update_rate", "needs model.moe.score sigmoid");
  validate_layers(dense_layers, model.num_layers, "model.moe.dense_layers", report);
  refuse(static_cast<int64_t>(std::set(dense_layers.begin(), dense_layers.end()).size()) >= model.num_layers, "dense_layers",
         "names every layer: leave model.moe out");
  if (!model.gated()) report("model.activation", "experts need swiglu or swiglu_clamped");
  if (model.mlp_bias) report("model.mlp_bias", "applies to dense models; for experts use model.moe.expert_mlp_bias");
}

template const FieldType& detail::field_type<ModelConfig>();
template const FieldType& detail::field_type<MoeConfig>();
template const FieldType& detail::field_type<RopeScalingConfig>();

}  // namespace mantissa
