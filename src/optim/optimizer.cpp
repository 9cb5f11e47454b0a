#include "optim/optimizer.h"

#include <array>
#include <cmath>
#include <numeric>

#include "mantissa/base/integers.h"
#include "nn/parameter.h"

namespace mantissa {
namespace {

int64_t norm_blocks(const ParameterShard& shard) { return ceil_div(shard.end - shard.begin, 32); }

// Takes as many values from the front of `rest` as the part has.
std::span<const double> next_part(std::span<const double>& rest, const Tensor& part) {
  const auto out = rest.first(static_cast<size_t>(part.elements()));
  rest = rest.subspan(out.size());
  return out;
}

}  // namespace

Optimizer::Optimizer(ParameterSet& parameters, const OptimizerConfig& config, const Mesh& mesh, int64_t bucket_bytes)
    : parameters_(parameters), shards_(parameters, mesh, bucket_bytes), config_(config) {
  require(parameters.gradients().defined(), "optimizer: the parameters have no gradients");
  for (const ParameterShard& shard : shards_.own()) {
    states_.push_back({.shard = shard, .master = {}, .first_moment = {}, .second_moment = {}});
    row_blocks_ += norm_blocks(shard);
  }
  allocate();
  step_ = zeros(parameters.device(), Dtype::f32, {static_cast<int64_t>(StepValue::count)});
}

void Optimizer::allocate() {
  const Dtype dtype = parameters_.master_dtype();
  Arena masters(dtype), first(dtype), second(dtype);
  for (const State& state : states_) {
    if (!parameters_.value_is_master(*state.shard.of)) masters.reserve(state.shard.shape());
    first.reserve(state.shard.shape());
    second.reserve(state.shard.shape());
  }
  for (Arena* arena : {&masters, &first, &second}) arena->allocate(parameters_.device());
  for (State& state : states_) {
    const Shape shape = state.shard.shape();
    state.master = parameters_.value_is_master(*state.shard.of) ? parameters_.room_for_master(state.shard) : masters.take(shape);
    state.first_moment = first.take(shape);
    state.second_moment = second.take(shape);
  }
}

void Optimizer::initialize(uint64_t seed) {
  for (const State& state : states_) parameters_.draw_initial(state.shard, seed, state.master);
  store_masters();
}

void Optimizer::store_masters() {
  shards_.arrive();
  parameters_.clear_nonfinite();
  for (const State& state : states_) parameters_.store(state.shard, state.master);
  shards_.gather();
}

// Sizes change only with the number of micro batches.
void Optimizer::make_report(const StepLosses& losses) {
  const int64_t figures = losses.figures.defined() ? losses.figures.elements() : 0;
  const int64_t sizes[] = {static_cast<int64_t>(StepOutcome::count), figures, 1, losses.losses.elements(), row_blocks_};
  const int64_t all = std::accumulate(std::begin(sizes), std::end(sizes), int64_t{0});
  if (report_.all.defined() && report_.all.elements() == all && report_.figures.elements() == figures) return;
  report_.all = empty(parameters_.device(), Dtype::f64, {all});
  int64_t begin = 0;
  Tensor* const parts[] = {&report_.outcome, &report_.figures, &report_.flag, &report_.losses, &report_.partials};
  for (size_t i = 0; i < std::size(parts); ++i) {
    *parts[i] = report_.all.slice(begin, begin + sizes[i]);
    begin += sizes[i];
  }
}

void Optimizer::finish_gradients(double lr, const StepLosses& losses, UpdateResult& result) {
  Backend& device = parameters_.device();
  std::array<float, static_cast<size_t>(StepValue::count)> step{};
  const auto set = [&](StepValue index, double value) { step[static_cast<size_t>(index)] = static_cast<float>(value); };
  const auto n = static_cast<double>(updates_ + 1);
  set(StepValue::lr, lr);
  set(StepValue::inverse_bias_correction1, 1.0 / (1.0 - std::pow(config_.beta1, n)));
  set(StepValue::inverse_bias_correction2, 1.0 / (1.0 - std::pow(config_.beta2, n)));
  device.upload(step.data(), step_);
  int64_t begin = 0;
  for (const State& state : states_) {
    const int64_t end = begin + norm_blocks(state.shard);
    device.run(SquaredNorm{.x = state.shard.gradient(), .partials = report_.partials.slice(begin, end)});
    begin = end;
  }
  FinishGradients finish{.partials = report_.partials,
                         .losses = losses.losses,
                         .flags = parameters_.nonfinite(),
                         .step = step_,
                         .outcome = report_.outcome,
                         .clip = config_.grad_clip,
                         .pairwise = losses.pairwise};
  if (losses.figures.defined()) device.run(Convert{.x = losses.figures.view(report_.figures.shape()), .out = report_.figures});
  result.vote = losses.vote;
  if (shards_.mesh().world.size() > 1) report_to_ranks(losses, finish, result);
  device.run(finish);
}

void Optimizer::report_to_ranks(const StepLosses& losses, FinishGradients& finish, UpdateResult& result) {
  Backend& device = parameters_.device();
  device.run(Convert{.x = losses.losses, .out = report_.losses});
  device.run(SumCounts{.counts = parameters_.nonfinite().view({1, 1}), .out = report_.flag});
  const std::vector<double> all = to_host<double>(report_.all.slice(report_.outcome.elements(), report_.all.elements()));
  std::span<const double> rest = all;
  const auto figures = next_part(rest, report_.figures), flag = next_part(rest, report_.flag), own_losses = next_part(rest, report_.losses),
             partials = next_part(rest, report_.partials);
  result.figures.assign(figures.begin(), figures.end());
  exchange_control(shards_, losses,
                   {.flag = flag.front(), .losses = own_losses, .assignments = losses.assignments_of(figures), .partials = partials},
                   finish, result);
}

void Optimizer::apply_to(const State& state) {
  const Tensor rounding = parameters_.rounding_target(state.shard);
  parameters_.device().run(AdamW{.master = state.master,
                                 .m = state.first_moment,
                                 .v = state.second_moment,
                                 .grad = state.shard.gradient(),
                                 .step = step_,
                                 .beta1 = config_.beta1,
                                 .beta2 = config_.beta2,
                                 .eps = config_.eps,
                                 .weight_decay = state.shard.of->decays() ? config_.weight_decay : 0.0,
                                 .value = rounding});
  parameters_.quantize(state.shard, rounding);
}

// Updates bucket by bucket: a finished bucket is sent while the next is updated.
void Optimizer::apply() {
  size_t next = 0;
  for (size_t bucket = 0; bucket < shards_.buckets(); ++bucket) {
    for (; next < shards_.own_end(bucket); ++next) apply_to(states_[next]);
    shards_.gather(bucket);
  }
}

UpdateResult Optimizer::update(double lr, const StepLosses& losses) {
  UpdateResult result{};
  shards_.reduce_gradients();
  make_report(losses);
  finish_gradients(lr, losses, result);
  apply();
  if (losses.meanwhile) losses.meanwhile();
  const bool alone = shards_.mesh().world.size() == 1;
  const int64_t read = report_.outcome.elements() + (alone ? report_.figures.elements() : 0);
  const std::vector<double> outcome = to_host<double>(report_.all.slice(0, read));
  if (alone) {
    result.figures.assign(outcome.begin() + report_.outcome.elements(), outcome.end());
    result.assignments = losses.assignments_of(result.figures);
  }
  const auto get = [&](StepOutcome index) { return outcome[static_cast<size_t>(index)]; };
  result.loss = get(StepOutcome::loss);
  result.gradient_norm = get(StepOutcome::gradient_norm);
  result.bad_weights = get(StepOutcome::bad_weights) != 0.0;
  result.skipped = get(StepOutcome::skip) != 0.0;
  if (!result.skipped) ++updates_;
  return result;
}

Optimizer::Nonfinite Optimizer::first_nonfinite_gradient() const {
  return first_found([](const State& state) { return nonfinite_text(state.shard, state.shard.gradient()); });
}

Optimizer::Nonfinite Optimizer::first_nonfinite_weight() const {
  return first_found([](const State& state) { return nonfinite_weight(state.shard, state.master); });
}

Optimizer::Nonfinite Optimizer::first_found(const std::function<std::string(const State&)>& search) const {
  for (const State& state : states_) {
    const std::string found = search(state);
    if (found.empty()) continue;
    size_t parameter = 0;
    while (&parameters_.all()[parameter] != state.shard.of) ++parameter;
    const std::vector<ParameterShard::Chunk> chunks = state.shard.chunks();
    return {.text = found, .parameter = parameter, .row = chunks.empty() ? state.shard.begin : chunks.front().row};
  }
  return {};
}

}  // namespace mantissa
