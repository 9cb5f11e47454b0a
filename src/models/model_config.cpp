#include "mantissa/models/model_config.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "mantissa/base/integers.h"

namespace mantissa {

int64_t ModelConfig::padded_vocab_size() const {
  require(vocab_size.has_value(), "model.vocab_size is not known yet");
  return round_up(*vocab_size, pad_vocab_to);
}

void ModelConfig::validate(ConfigReport& report) const {
  if (!head_dim && hidden_size % num_attention_heads != 0) {
    report.error("model.hidden_size",
                 text("must be a multiple of num_attention_heads ", num_attention_heads, " unless head_dim is given, got ", hidden_size));
  } else if (position == Position::rope && head_size() % 2 != 0) {
    report.error(head_dim ? "model.head_dim" : "model.hidden_size",
                 text("rotary positions need an even head_dim, got ", head_size(), head_dim ? "" : " = hidden_size / num_attention_heads"));
  }
  if (num_attention_heads % kv_heads() != 0) {
    report.error("model.num_key_value_heads", text("must divide num_attention_heads ", num_attention_heads, ", got ", kv_heads()));
  }
  if (num_attention_heads * head_size() > kWidestHeads) {
    report.error("model.num_attention_heads",
                 text("num_attention_heads ", num_attention_heads, " * head_dim ", head_size(), " is more than ", kWidestHeads));
  }
  if (moe) moe->validate(*this, report);
  if (norm_bias && norm == Norm::rms) report.error("model.norm_bias", "RMSNorm has no bias: needs model.norm layer");
}

bool ModelConfig::has_experts(int64_t layer) const { return moe && std::ranges::find(moe->dense_layers, layer) == moe->dense_layers.end(); }

// Softmax over the chosen logits is the scores of the chosen divided by their sum, and stays finite where these vanish.
RoutingRule MoeConfig::rule() const {
  const bool divides = norm_topk_prob.value_or(num_experts_per_tok > 1), softmax = score == RouterScore::softmax;
  return {.choices = num_experts_per_tok,
          .score = score,
          .score_after_choice = score_after_choice || (softmax && divides),
          .renormalise = !softmax && divides,
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

void MoeConfig::validate(const ModelConfig& model, ConfigReport& report) const {
  const auto refuse = [&](bool wrong, const char* key, const std::string& why) {
    if (wrong) report.error(std::string("model.moe.") + key, why);
  };
  refuse(num_experts_per_tok > num_experts, "num_experts_per_tok",
         text("must be at most num_experts ", num_experts, ", got ", num_experts_per_tok));
  if (num_experts_per_tok > num_experts) return;
  refuse(num_experts % n_group != 0, "n_group", text("must divide num_experts ", num_experts, ", got ", n_group));
  refuse(topk_group > n_group, "topk_group", text("must be at most n_group ", n_group, ", got ", topk_group));
  refuse(topk_group <= n_group && topk_group * (num_experts / n_group) < num_experts_per_tok, "topk_group",
         text(count_text(topk_group, "group"), " of ", num_experts / n_group, " experts have fewer than num_experts_per_tok ",
              num_experts_per_tok));
  refuse(score_after_choice && score != RouterScore::softmax, "score_after_choice", "needs model.moe.score softmax");
  refuse(score_after_choice && num_experts_per_tok == 1, "score_after_choice",
         "with num_experts_per_tok 1 every weight is 1 and the router learns nothing from the loss");
  refuse(has_expert_bias() && score != RouterScore::sigmoid, "bias_update_rate", "needs model.moe.score sigmoid");
  std::set<int64_t> dense;
  for (const int64_t layer : dense_layers) {
    refuse(layer < 0 || layer >= model.num_layers, "dense_layers",
           text("there is no layer ", layer, ", model.num_layers is ", model.num_layers));
    refuse(!dense.insert(layer).second, "dense_layers", text("names layer ", layer, " twice"));
  }
  refuse(static_cast<int64_t>(dense.size()) >= model.num_layers, "dense_layers", "names every layer: leave model.moe out");
  if (model.activation != Activation::swiglu) report.error("model.activation", "experts need swiglu");
  if (model.mlp_bias) report.error("model.mlp_bias", "experts have no biases");
}

}  // namespace mantissa
