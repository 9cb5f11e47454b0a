#include "mantissa/nn/modules.h"

#include <cmath>

#include "mantissa/backend/functions.h"

namespace mantissa {

Linear::Linear(ParameterSet& set, const std::string& path, int64_t in, int64_t out, bool bias, double init_std)
    : weight_(&set.add(path + ".weight", {out, in}, {.constant = 0.0, .std = init_std})) {
  if (bias) bias_ = &set.add(path + ".bias", {out}, {});
}

NormLayer::NormLayer(ParameterSet& set, const std::string& path, int64_t channels, const NormOptions& options)
    : weight_(&set.add(path + ".weight", {channels}, {.constant = 1.0, .std = 0.0})), options_(options) {
  require(!options.bias || options.layer_norm, path, ": RMSNorm has no bias");
  if (options.bias) bias_ = &set.add(path + ".bias", {channels}, {});
}

Var NormLayer::forward(const Var& x) const {
  if (!options_.layer_norm) return rms_norm(x, weight_->var(), options_.eps);
  return layer_norm(x, weight_->var(), bias_ ? bias_->var() : Var(), options_.eps);
}

Attention::Attention(ParameterSet& set, const std::string& path, const AttentionOptions& options)
    : options_(options),
      qkv_(set, path + ".qkv", options.hidden, options.layout.row(), options.qkv_bias, options.init_std),
      out_(set, path + ".out", options.layout.heads * options.layout.head_dim, options.hidden, options.out_bias, options.out_init_std) {
  if (!options.qk_norm) return;
  q_norm_ = &set.add(path + ".q_norm.weight", {options.layout.head_dim}, {.constant = 1.0, .std = 0.0});
  k_norm_ = &set.add(path + ".k_norm.weight", {options.layout.head_dim}, {.constant = 1.0, .std = 0.0});
}

Var Attention::core(const Var& qkv, const SequenceContext& context) const {
  Var x = qkv;
  if (q_norm_) x = qk_norm(x, q_norm_->var(), k_norm_->var(), options_.layout, options_.norm_eps);
  if (context.rope_table.defined()) x = rope(x, context.rope_table, context.positions, options_.layout);
  if (context.cache) return cached(x, context);
  return attention(x, context.batch, options_.layout, context.segment_starts);
}

// Generation only: nothing is recorded.
Var Attention::cached(const Var& qkv, const SequenceContext& context) const {
  const Tensor& x = qkv.value();
  require(!qkv.wants_gradient(), "attention over a cache has no gradient");
  KeyValueCache& cache = *context.cache;
  Tensor out = empty(x.device(), x.dtype(), {x.dim(0), options_.layout.heads * options_.layout.head_dim});
  x.device().run(CachedAttention{.qkv = x,
                                 .keys = cache.keys,
                                 .values = cache.values,
                                 .out = out,
                                 .first = cache.length,
                                 .layout = options_.layout,
                                 .scale = 1.0 / std::sqrt(static_cast<double>(options_.layout.head_dim))});
  cache.length += x.dim(0);
  return Var(out);
}

Var Attention::forward(const Var& x, const SequenceContext& context) const {
  const Var qkv = qkv_.forward(x);
  if (!options_.recompute || !recording({qkv})) return out_.forward(core(qkv, context));
  return out_.forward(recompute(qkv, [this, context](const Var& again) { return core(again, context); }));
}

Mlp::Mlp(ParameterSet& set, const std::string& path, const MlpOptions& options)
    : options_(options),
      up_(set, path + (options.gelu ? ".up" : ".gate_up"), options.hidden, options.gelu ? options.intermediate : 2 * options.intermediate,
          options.bias, options.init_std),
      down_(set, path + ".down", options.intermediate, options.hidden, options.bias, options.down_init_std) {}

Var Mlp::forward(const Var& x) const {
  const Var up = up_.forward(x);
  return down_.forward(options_.gelu ? gelu(up, *options_.gelu, options_.keep) : swiglu(up, options_.keep));
}

}  // namespace mantissa
