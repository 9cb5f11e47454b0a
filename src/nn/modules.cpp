#include "mantissa/nn/modules.h"

#include <cmath>

#include "mantissa/backend/functions.h"

namespace mantissa {

Storage WeightPrecision::storage() const {
  Storage out{.dtype = recipe.compute};
  if (recipe.weight_fake_quant) out.codes = recipe.weight_fake_quant;
  if (recipe.reads_weight_codes()) {
    out.codes = recipe.weight;
    out.codes_only = codes_only;
  }
  return out;
}

Linear::Linear(ParameterSet& set, const std::string& path, int64_t in, int64_t out, bool bias, double init_std,
               const PrecisionOf& precision)
    : recipe_(precision(path).recipe),
      weight_(&set.add(path + ".weight", {out, in}, {.constant = 0.0, .std = init_std}, precision(path).storage())) {
  if (bias) bias_ = &set.add(path + ".bias", {out}, {}, {.dtype = recipe_.compute});
}

NormLayer::NormLayer(ParameterSet& set, const std::string& path, int64_t channels, const NormOptions& options, const PrecisionOf& precision)
    : weight_(&set.add(path + ".weight", {channels}, {.constant = 1.0, .std = 0.0}, precision(path).storage())), options_(options) {
  require(!options.bias || options.layer_norm, path, ": RMSNorm has no bias");
  if (options.bias) bias_ = &set.add(path + ".bias", {channels}, {}, precision(path).storage());
}

Var NormLayer::forward(const Var& x) const {
  if (!options_.layer_norm) return rms_norm(x, weight_->var(), options_.eps);
  return layer_norm(x, weight_->var(), bias_ ? bias_->var() : Var(), options_.eps);
}

Attention::Attention(ParameterSet& set, const std::string& path, const AttentionOptions& options, const PrecisionOf& precision)
    : options_(options),
      qkv_(set, path + ".qkv", options.hidden, options.layout.row(), options.qkv_bias, options.init_std, precision),
      out_(set, path + ".out", options.layout.heads * options.layout.head_dim, options.hidden, options.out_bias, options.out_init_std,
           precision) {
  if (!options.qk_norm) return;
  const auto add = [&](const char* name) {
    const std::string module = path + name;
    return &set.add(module + ".weight", {options.layout.head_dim}, {.constant = 1.0, .std = 0.0}, precision(module).storage());
  };
  q_norm_ = add(".q_norm");
  k_norm_ = add(".k_norm");
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

Mlp::Mlp(ParameterSet& set, const std::string& path, const MlpOptions& options, const PrecisionOf& precision)
    : options_(options),
      up_(set, path + (options.gelu ? ".up" : ".gate_up"), options.hidden, options.gelu ? options.intermediate : 2 * options.intermediate,
          options.bias, options.init_std, precision),
      down_(set, path + ".down", options.intermediate, options.hidden, options.bias, options.down_init_std, precision) {}

Var Mlp::forward(const Var& x) const {
  const Var up = up_.forward(x);
  return down_.forward(options_.gelu ? gelu(up, *options_.gelu, options_.keep) : swiglu(up, options_.keep));
}

}  // namespace mantissa
