#include "nn/moe.h"

#include <algorithm>

#include "backend/few_rows.h"
#include "mantissa/backend/functions.h"

namespace mantissa {

Tensor RouterStatistics::next(Backend& device, int64_t experts) {
  if (!figures_.defined() || passes_ == figures_.dim(0)) {
    const Tensor wider = empty(device, Dtype::f64, {std::max(room_, 2 * passes_), experts + kLosses});
    if (passes_ > 0) device.run(Convert{.x = figures_, .out = wider.slice(0, passes_)});
    figures_ = wider;
  }
  ++passes_;
  return figures_.slice(passes_ - 1, passes_).view({experts + kLosses});
}

Moe::Moe(ParameterSet& set, const PrecisionPlan& plan, const std::string& path, const MoeOptions& options, const Mesh& mesh)
    : path_(path),
      options_(options),
      mesh_(mesh),
      router_(set, plan.of(path + ".router"), options.init_std, mesh),
      gate_up_(grouped_weight(set, plan.of(path + ".experts.gate_up"), options.init_std)),
      down_(grouped_weight(set, plan.of(path + ".experts.down"), options.down_init_std)),
      multiple_(std::max({int64_t{32}, gate_up_.operands.block, down_.operands.block})) {
  const ModuleShape& router = plan.of(path + ".router").module;
  if (router.buffer > 0) expert_bias_ = &set.add_buffer({.name = router.buffer_name, .shape = {router.buffer}});
  if (!plan.find(path + ".shared.down")) return;
  const MlpOptions shared{
      .gelu = {}, .init_std = options.init_std, .down_init_std = options.down_init_std, .keep = options.keep, .limit = options.limit};
  shared_.emplace(set, plan, path + ".shared", shared, mesh);
}

Moe::GroupedWeight Moe::grouped_weight(ParameterSet& set, const ModulePrecision& module, double init_std) {
  const SimulatedOperands& simulated = module.recipe.simulated;
  for (const Simulation& how : {simulated.weight, simulated.input, simulated.output_grad}) {
    if (how && numbered_ != Rounding::stochastic) numbered_ = how.rounding;
  }
  const Init init{.constant = 0.0, .std = init_std};
  GroupedWeight out{.path = module.module.path,
                    .operands = module.recipe,
                    .weight = &set.add(weight_of(module, init, mesh_.ranks(), options_.expert_gradients))};
  if (module.module.bias > 0) out.bias = &set.add(bias_of(module, mesh_.ranks(), options_.expert_gradients));
  return out;
}

Var Moe::forward(const Var& x, const SequenceContext& context, int64_t capacity, RouterStatistics* statistics) const {
  const ModuleScope scope(path_);
  const int64_t tokens = context.tokens;
  RoutingOptions routing = options_.routing;
  routing.sequences = context.batch;
  const TensorParallel shared_tokens = tensor_parallel(mesh_, Split::column_parallel, tokens);
  const Var all = gathered_tokens(x, shared_tokens);
  Var logits = router_.forward(convert(all, stats_dtype(all.value().dtype())), tokens);
  if (context.router_mask.defined()) logits = add(logits, Var(context.router_mask));
  const Routing chosen = route(logits, routing, expert_bias_ ? expert_bias_->value : Tensor());
  if (statistics && !Tape::in_backward()) {
    const Tensor& scored = logits.value();
    const Tensor row = statistics->next(scored.device(), scored.dim(1));
    scored.device().run(SumCounts{.counts = chosen.counts, .out = row.slice(0, scored.dim(1))});
    if (statistics->wanted() == RouterFigures::counts_and_losses) {
      const Tensor losses = row.slice(scored.dim(1), row.dim(0));
      scored.device().run(
          RouterLosses{.logits = scored, .scores = chosen.scores, .counts = chosen.counts, .out = losses, .rule = routing.rule});
    }
  }
  const int64_t multiple = FewRows::allowed(1) ? 1 : multiple_;  // generation has no gradients, which need whole blocks of tokens
  const Dispatch to = dispatched(chosen.experts, multiple, capacity);
  const Var y = own_tokens(experts(all, chosen.weights, to), shared_tokens);
  return shared_ ? add(y, shared_->forward(x, tokens)) : y;
}

Dispatch Moe::dispatched(const Tensor& experts, int64_t multiple, int64_t capacity) const {
  Dispatch out = dispatch(experts, options_.experts, multiple, capacity, mesh_.expert, options_.expert_gradients);
  if (numbered_) number_rows(out, *numbered_);
  return out;
}

Var Moe::experts(const Var& x, const Var& weights, const Dispatch& to) const {
  const Var inner = [&] {
    const ModuleScope scope(gate_up_.path);
    return dispatched_swiglu(x, weights, gate_up_.weight->weight(), gate_up_.bias_var(), to, gate_up_.operands,
                             {.keep = options_.keep, .as_codes = options_.quantized_dispatch, .limit = options_.limit},
                             {.group = mesh_.tensor, .split = Split::column_parallel});
  }();
  const ModuleScope scope(down_.path);
  return combined_linear(inner, down_.weight->weight(), down_.bias_var(), to, down_.operands,
                         {.group = mesh_.tensor, .split = Split::row_parallel});
}

void Moe::join_collectives(const Tensor& x) const {
  const Tape::Scope paused(nullptr);
  const Shape none{0, options_.routing.rule.top_k};
  const Tensor assignments = empty(x.device(), Dtype::i32, none), weights = empty(x.device(), stats_dtype(x.dtype()), none);
  experts(Var(x), Var(weights), dispatched(assignments, multiple_, 0));
}

}  // namespace mantissa
