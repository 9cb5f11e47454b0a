#include "mantissa/models/model_config.h"

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
  if (norm_bias && norm == Norm::rms) report.error("model.norm_bias", "RMSNorm has no bias: needs model.norm layer");
}

}  // namespace mantissa
