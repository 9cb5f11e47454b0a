#include "mantissa/nn/modules.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "mantissa/backend/functions.h"

namespace mantissa {

namespace {

constexpr Init kOnes{.constant = 1.0, .std = 0.0};

std::vector<int64_t> rows_of(const std::vector<ModulePart>& parts) {
  std::vector<int64_t> rows;
  for (const ModulePart& part : parts) rows.push_back(part.out);
  return rows;
}

// A tensor that all ranks hold whole has a gradient that is the sum of theirs if each applies it to its own tokens, or to its own heads.
// Routers read all tokens on every rank.
bool partial_gradient(const ModuleShape& of, ShareOf share, bool sequence) {
  return share.ranks > 1 && ((sequence && of.kind != ModuleKind::router) || of.role == ModuleRole::head_norm);
}

// Specifies a bias, which is never quantized. It is whole on each rank where the columns of the weight are divided.
ParameterSpec bias_of(const ModulePrecision& module, ShareOf share, bool sequence) {
  const ModuleShape& of = module.module;
  const bool column_parallel = of.split == Split::column_parallel;
  ParameterSpec bias{.name = of.bias_name(), .shape = {of.bias}, .dtype = module.recipe.compute};
  if (column_parallel) bias.parts = rows_of(of.parts);
  bias.partial_gradient = !column_parallel && partial_gradient(of, share, sequence);
  return share_of(bias, column_parallel ? Split::column_parallel : Split::none, share);
}

}  // namespace

ParameterSpec weight_of(const ModulePrecision& module, Init init, ShareOf share, bool sequence) {
  const ModuleShape& of = module.module;
  return share_of({.name = of.weight_name(),
                   .shape = of.in == 0 ? Shape{of.out} : Shape{of.rows(), of.in},
                   .init = init,
                   .dtype = module.recipe.compute,
                   .quantized = module.resident_codes(),
                   .keeps_value = !module.stores_only_codes(),
                   .padding = of.padding,
                   .parts = of.matrices > 1 ? std::vector<int64_t>() : rows_of(of.parts),
                   .partial_gradient = of.split == Split::none && partial_gradient(of, share, sequence)},
                  of.split, share);
}

namespace {

// Returns a rank's share of `whole`, the matrices of a grouped weight or their biases, which tensor ranks divide by `split`.
ParameterSpec grouped(ParameterSpec whole, const ModuleShape& of, const ExpertShare& experts, Split split, ShareOf share) {
  whole.experts = experts.share;
  whole.matrices = of.matrices / experts.share.ranks;
  whole.shape = whole.shape.with_dim0(whole.matrices * of.out);
  whole.parts.clear();
  for (int64_t i = 0; i < whole.matrices; ++i) std::ranges::copy(rows_of(of.parts), std::back_inserter(whole.parts));
  if (experts.by_source) whole.sources = experts.share.ranks;
  return share_of(std::move(whole), split, share);
}

}  // namespace

ParameterSpec grouped_weight_of(const ModulePrecision& module, Init init, const ExpertShare& experts, ShareOf share) {
  return grouped(weight_of(module, init), module.module, experts, module.module.split, share);
}

ParameterSpec grouped_bias_of(const ModulePrecision& module, const ExpertShare& experts, ShareOf share) {
  const Split split = module.module.split == Split::column_parallel ? Split::column_parallel : Split::none;
  return grouped(bias_of(module, {}, false), module.module, experts, split, share);
}

std::vector<ParameterSpec> parameter_specs(const PrecisionPlan& plan, ShareOf share, bool sequence, const ExpertShare& experts) {
  std::vector<ParameterSpec> specs;
  for (const ModulePrecision& module : plan.modules()) {
    const bool grouped = module.module.experts;
    specs.push_back(grouped ? grouped_weight_of(module, {}, experts, share) : weight_of(module, {}, share, sequence));
    if (module.module.bias == 0) continue;
    specs.push_back(grouped ? grouped_bias_of(module, experts, share) : bias_of(module, share, sequence));
  }
  return specs;
}

Linear::Linear(ParameterSet& set, const ModulePrecision& module, double init_std, const TensorRanks& ranks)
    : recipe_(module.recipe), ranks_(ranks), weight_(&set.add(weight_of(module, {.constant = 0.0, .std = init_std}, ranks.share()))) {
  if (module.module.bias > 0) bias_ = &set.add(bias_of(module, ranks.share(), ranks.sequence));
}

NormLayer::NormLayer(ParameterSet& set, const ModulePrecision& module, const NormOptions& options, const TensorRanks& ranks)
    : options_(options) {
  weight_ = &set.add(weight_of(module, kOnes, ranks.share(), ranks.sequence));
  require(module.module.bias == 0 || options.layer_norm, module.module.path, ": RMSNorm has no bias");
  if (module.module.bias > 0) bias_ = &set.add(bias_of(module, ranks.share(), ranks.sequence));
}

Var NormLayer::forward(const Var& x) const {
  if (!options_.layer_norm) return rms_norm(x, weight_->var(), options_.eps);
  return layer_norm(x, weight_->var(), bias_ ? bias_->var() : Var(), options_.eps);
}

Attention::Attention(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const AttentionOptions& options,
                     const TensorRanks& ranks)
    : options_(options),
      qkv_(set, plan.of(path + ".qkv"), options.init_std, ranks),
      out_(set, plan.of(path + ".out"), options.out_init_std, ranks) {
  const auto add = [&](const char* name, Init init) -> Parameter* {
    const ModulePrecision* const found = plan.find(path + name);
    return found ? &set.add(weight_of(*found, init, ranks.share(), ranks.sequence)) : nullptr;
  };
  q_norm_ = add(".q_norm", kOnes);
  k_norm_ = add(".k_norm", kOnes);
  sinks_ = add(".sinks", {.constant = 0.0, .std = options.init_std});
}

Var Attention::core(const Var& qkv, const SequenceContext& context) const {
  Var x = qkv;
  if (q_norm_) x = qk_norm(x, q_norm_->var(), k_norm_->var(), options_.layout, options_.norm_eps);
  if (context.rope_table.defined()) x = rope(x, context.rope_table, context.positions, options_.layout);
  if (context.cache) return cached(x, context);
  return attention(x, context.batch, options_.layout, context.segment_starts, options_.window, sinks_ ? sinks_->var() : Var());
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
                                 .scale = 1.0 / std::sqrt(static_cast<double>(options_.layout.head_dim)),
                                 .window = options_.window,
                                 .sinks = sinks_ ? sinks_->value() : Tensor()});
  cache.length += x.dim(0);
  return Var(out);
}

Var Attention::forward(const Var& x, const SequenceContext& context) const {
  const Var qkv = qkv_.forward(x, context.tokens);
  if (!options_.recompute || !recording({qkv})) return out_.forward(core(qkv, context), context.tokens);
  return out_.forward(recompute(qkv, [this, context](const Var& again) { return core(again, context); }), context.tokens);
}

Mlp::Mlp(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const MlpOptions& options, const TensorRanks& ranks)
    : options_(options),
      up_(set, plan.of(path + (options.gelu ? ".up" : ".gate_up")), options.init_std, ranks),
      down_(set, plan.of(path + ".down"), options.down_init_std, ranks) {}

Var Mlp::forward(const Var& x, int64_t tokens) const {
  const Var up = up_.forward(x, tokens);
  return down_.forward(options_.gelu ? gelu(up, *options_.gelu, options_.keep) : swiglu(up, options_.keep, options_.limit), tokens);
}

}  // namespace mantissa
