#include "nn/modules.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "mantissa/backend/functions.h"

namespace mantissa {

namespace {

constexpr Init kOnes{.constant = 1.0, .std = 0.0};

// Returns a rank's share of a parameter that is whole so far. A tensor that all tensor ranks hold whole has a gradient that is the sum of
// theirs if each applies it to its own tokens, or to its own heads. Routers and experts read all tokens on every rank.
ParameterSpec share_of(ParameterSpec whole, const ModuleShape& of, const Sharding& by, ExpertGradients gradients) {
  for (int64_t i = 0; i < of.matrices; ++i) std::ranges::transform(of.parts, std::back_inserter(whole.parts), &ModulePart::out);
  whole.matrices = of.matrices;
  const bool each_has_own = of.role == ModuleRole::head_norm || (by.ranks.sequence_parallel && of.kind != ModuleKind::router);
  whole.partial_gradient = by.split == Split::none && by.ranks.tensor > 1 && !of.experts && each_has_own;
  if (gradients == ExpertGradients::by_source) whole.sources = by.ranks.expert;
  return sharded(std::move(whole), by);
}

}  // namespace

ParameterSpec weight_of(const ModulePrecision& module, Init init, const ModelRanks& ranks, ExpertGradients gradients) {
  const ModuleShape& of = module.module;
  return share_of({.name = of.weight_name(),
                   .shape = of.in == 0 ? Shape{of.out} : Shape{of.rows(), of.in},
                   .init = init,
                   .dtype = module.recipe.compute,
                   .quantized = module.resident_codes(),
                   .keeps_value = !module.stores_only_codes(),
                   .padding = of.padding,
                   .training = module.training},
                  of, of.sharding(ranks), gradients);
}

// A bias is never quantized.
ParameterSpec bias_of(const ModulePrecision& module, const ModelRanks& ranks, ExpertGradients gradients) {
  const ModuleShape& of = module.module;
  return share_of({.name = of.bias_name(), .shape = {of.bias}, .dtype = module.recipe.compute, .training = module.training}, of,
                  of.bias_sharding(ranks), gradients);
}

std::vector<ParameterSpec> parameter_specs(const PrecisionPlan& plan, const ModelRanks& ranks, ExpertGradients gradients) {
  std::vector<ParameterSpec> specs;
  for (const ModulePrecision& module : plan.modules()) {
    specs.push_back(weight_of(module, {}, ranks, gradients));
    if (module.module.bias > 0) specs.push_back(bias_of(module, ranks, gradients));
  }
  return specs;
}

Linear::Linear(ParameterSet& set, const ModulePrecision& module, double init_std, const Mesh& mesh)
    : path_(module.module.path),
      operands_(module.recipe),
      mesh_(mesh),
      weight_(&set.add(weight_of(module, {.constant = 0.0, .std = init_std}, mesh.ranks()))) {
  if (module.module.bias > 0) bias_ = &set.add(bias_of(module, mesh.ranks()));
}

NormLayer::NormLayer(ParameterSet& set, const ModulePrecision& module, const NormOptions& options, const Mesh& mesh)
    : path_(module.module.path), options_(options) {
  weight_ = &set.add(weight_of(module, kOnes, mesh.ranks()));
  require(module.module.bias == 0 || options.layer_norm, module.module.path, ": RMSNorm has no bias");
  if (module.module.bias > 0) bias_ = &set.add(bias_of(module, mesh.ranks()));
}

NormedSum NormLayer::forward(const Residual& x) const {
  const ModuleScope scope(path_);
  if (!options_.layer_norm) return rms_norm(x, weight_->var(), options_.eps);
  return layer_norm(x, weight_->var(), bias_ ? bias_->var() : Var(), options_.eps);
}

Attention::Attention(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const AttentionOptions& options,
                     const Mesh& mesh)
    : path_(path),
      options_(options),
      qkv_(set, plan.of(path + ".qkv"), options.init_std, mesh),
      out_(set, plan.of(path + ".out"), options.out_init_std, mesh) {
  const auto add = [&](const char* name, Init init) -> Parameter* {
    const ModulePrecision* const found = plan.find(path + name);
    return found ? &set.add(weight_of(*found, init, mesh.ranks())) : nullptr;
  };
  q_norm_ = add(".q_norm", kOnes);
  k_norm_ = add(".k_norm", kOnes);
  sinks_ = add(".sinks", {.constant = 0.0, .std = options.init_std});
}

Var Attention::core(Var x, const SequenceContext& context) const {
  if (q_norm_) x = qk_norm(x, q_norm_->var(), k_norm_->var(), options_.layout, options_.norm_eps);
  if (context.rope_table.defined()) x = rope(std::move(x), context.rope_table, context.positions, options_.layout);
  if (!context.caches.empty()) return cached(x, context);
  return attention(x, context.batch, options_.layout, context.segment_starts, options_.window, sinks_ ? sinks_->var() : Var());
}

// Generation only: nothing is recorded.
Var Attention::cached(const Var& qkv, const SequenceContext& context) const {
  const Tensor& x = qkv.value();
  require(!qkv.wants_gradient(), "attention over a cache has no gradient");
  Tensor out = empty(x.device(), x.dtype(), {x.dim(0), options_.layout.heads * options_.layout.head_dim});
  const int64_t rows = x.dim(0) / std::ssize(context.caches);
  int64_t first = 0;
  for (KeyValueCache* cache : context.caches) {
    x.device().run(CachedAttention{.qkv = x.slice(first, first + rows),
                                   .keys = cache->keys,
                                   .values = cache->values,
                                   .out = out.slice(first, first + rows),
                                   .first = cache->length,
                                   .layout = options_.layout,
                                   .scale = 1.0 / std::sqrt(static_cast<double>(options_.layout.head_dim)),
                                   .window = options_.window,
                                   .sinks = sinks_ ? sinks_->value() : Tensor()});
    cache->length += rows;
    first += rows;
  }
  return Var(out);
}

Var Attention::forward(const Var& x, const SequenceContext& context) const {
  const ModuleScope scope(path_);
  Var qkv = qkv_.forward(x, context.tokens);
  if (!options_.recompute || !recording({qkv})) return out_.forward(core(std::move(qkv), context), context.tokens);
  return out_.forward(recompute(qkv, [this, context](const Var& again) { return core(again, context); }), context.tokens);
}

Mlp::Mlp(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const MlpOptions& options, const Mesh& mesh)
    : path_(path),
      options_(options),
      up_(set, plan.of(path + (options.gelu ? ".up" : ".gate_up")), options.init_std, mesh),
      down_(set, plan.of(path + ".down"), options.down_init_std, mesh) {}

Var Mlp::forward(const Var& x, int64_t tokens) const {
  const ModuleScope scope(path_);
  const Var up = up_.forward(x, tokens);
  return down_.forward(options_.gelu ? gelu(up, *options_.gelu, options_.keep) : swiglu(up, options_.keep, options_.limit), tokens);
}

}  // namespace mantissa
