#include "mantissa/nn/modules.h"

#include <cmath>

#include "mantissa/backend/functions.h"

namespace mantissa {

namespace {

constexpr Init kOnes{.constant = 1.0, .std = 0.0};

// A bias is never quantised.
ParameterSpec bias_of(const ModulePrecision& module) {
  return {.name = module.module.path + ".bias", .shape = {module.module.bias}, .dtype = module.recipe.compute};
}

}  // namespace

ParameterSpec weight_of(const ModulePrecision& module, Init init) {
  const ModuleShape& of = module.module;
  return {.name = of.path + ".weight",
          .shape = of.in == 0 ? Shape{of.out} : Shape{of.out, of.in},
          .init = init,
          .dtype = module.recipe.compute,
          .quantised = module.resident_codes(),
          .keeps_value = !module.stores_only_codes(),
          .padding = of.padding};
}

std::vector<ParameterSpec> parameter_specs(const PrecisionPlan& plan) {
  std::vector<ParameterSpec> specs;
  for (const ModulePrecision& module : plan.modules()) {
    specs.push_back(weight_of(module, {}));
    if (module.module.bias > 0) specs.push_back(bias_of(module));
  }
  return specs;
}

Linear::Linear(ParameterSet& set, const ModulePrecision& module, double init_std)
    : recipe_(module.recipe), weight_(&set.add(weight_of(module, {.constant = 0.0, .std = init_std}))) {
  if (module.module.bias > 0) bias_ = &set.add(bias_of(module));
}

NormLayer::NormLayer(ParameterSet& set, const ModulePrecision& module, const NormOptions& options)
    : weight_(&set.add(weight_of(module, kOnes))), options_(options) {
  require(module.module.bias == 0 || options.layer_norm, module.module.path, ": RMSNorm has no bias");
  if (module.module.bias > 0) bias_ = &set.add(bias_of(module));
}

Var NormLayer::forward(const Var& x) const {
  if (!options_.layer_norm) return rms_norm(x, weight_->var(), options_.eps);
  return layer_norm(x, weight_->var(), bias_ ? bias_->var() : Var(), options_.eps);
}

Attention::Attention(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const AttentionOptions& options)
    : options_(options), qkv_(set, plan.of(path + ".qkv"), options.init_std), out_(set, plan.of(path + ".out"), options.out_init_std) {
  if (!plan.find(path + ".q_norm")) return;
  q_norm_ = &set.add(weight_of(plan.of(path + ".q_norm"), kOnes));
  k_norm_ = &set.add(weight_of(plan.of(path + ".k_norm"), kOnes));
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

Mlp::Mlp(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const MlpOptions& options)
    : options_(options),
      up_(set, plan.of(path + (options.gelu ? ".up" : ".gate_up")), options.init_std),
      down_(set, plan.of(path + ".down"), options.down_init_std) {}

Var Mlp::forward(const Var& x) const {
  const Var up = up_.forward(x);
  return down_.forward(options_.gelu ? gelu(up, *options_.gelu, options_.keep) : swiglu(up, options_.keep));
}

}  // namespace mantissa
