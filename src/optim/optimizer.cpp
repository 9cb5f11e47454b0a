#include "optim/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <span>
#include <utility>
#include <vector>

#include "nn/parameter.h"

namespace mantissa {

Optimizer::Optimizer(ParameterSet& parameters, const OptimizerConfig& config, const Mesh& mesh, std::optional<int64_t> least_bucket,
                     const OptimizerNumerics& numerics)
    : parameters_(parameters),
      shards_(parameters, mesh, least_bucket),
      config_(config),
      seed_(numerics.seed),
      muon_(shards_.layout(), mesh, shards_.own(), config.muon, parameters.master_dtype() == Dtype::f64 ? Dtype::f64 : numerics.directions,
            parameters.device()) {
  require(parameters.gradients().defined(), "optimizer: the parameters have no gradients");
  for (const ParameterShard& shard : shards_.own())
    states_.push_back({.shard = shard, .master = {}, .first_moment = {}, .second_moment = {}});
  const Dtype dtype = parameters_.master_dtype();
  const Dtype moments = config_.moments == Dtype::bf16 ? Dtype::bf16 : dtype;
  Arena masters(dtype), first(moments), second(moments);
  for (const State& state : states_) {
    if (!parameters_.value_is_master(*state.shard.of)) masters.reserve(state.shard.shape());
    if (state.shard.of->moments() > 0) first.reserve(state.shard.shape());
    if (state.shard.of->moments() > 1) second.reserve(state.shard.shape());
  }
  for (Arena* arena : {&masters, &first, &second}) arena->allocate(parameters_.device());
  for (State& state : states_) {
    const Shape shape = state.shard.shape();
    state.master = parameters_.value_is_master(*state.shard.of) ? parameters_.room_for_master(state.shard) : masters.take(shape);
    if (state.shard.of->moments() > 0) state.first_moment = first.take(shape);
    if (state.shard.of->moments() > 1) state.second_moment = second.take(shape);
  }
  step_ = zeros(parameters.device(), Dtype::f32, {static_cast<int64_t>(StepValue::count)});
  for (const State& state : states_) {
    const double factor = state.shard.of->training.lr_factor;
    if (factor != 1.0 && factor != 0.0) scaled_.emplace(factor, empty_like(step_));
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

UpdateResult Optimizer::update(double lr, const StepLosses& losses) {
  Backend& device = parameters_.device();
  shards_.reduce_gradients();
  const Tensor& partials = control_.begin(device, losses);
  std::array<float, static_cast<size_t>(StepValue::count)> step{};
  const auto set = [&](StepValue index, double value) { step[static_cast<size_t>(index)] = static_cast<float>(value); };
  const auto n = static_cast<double>(updates_ + 1);
  set(StepValue::lr, lr);
  set(StepValue::inverse_bias_correction1, 1.0 / (1.0 - std::pow(config_.beta1, n)));
  set(StepValue::inverse_bias_correction2, 1.0 / (1.0 - std::pow(config_.beta2, n)));
  device.upload(step.data(), step_);
  std::vector<SquaredNorm> norms;
  int64_t begin = 0;
  for (const State& state : states_) {
    if (!state.shard.of->trained()) continue;
    const int64_t end = begin + state.shard.norms();
    norms.push_back({.x = state.shard.gradient(), .partials = partials.slice(begin, end)});
    begin = end;
  }
  device.run_all(std::span<const SquaredNorm>(norms));
  control_.decide(losses, parameters_.nonfinite(), step_, config_.grad_clip);
  for (const auto& [factor, values] : scaled_) {  // with the decision
    const auto scaled = static_cast<float>(lr * factor);
    constexpr auto kLr = static_cast<int64_t>(StepValue::lr);
    device.run(Convert{.x = step_, .out = values});
    device.upload(&scaled, values.slice(kLr, kLr + 1));
  }
  std::vector<Tensor> directions(states_.size());
  if (!muon_.alone() && !muon_.none()) {
    for (size_t i = 0; i < states_.size(); ++i) {
      if (states_[i].shard.of->by_muon()) directions[i] = momentum(states_[i]);
    }
    muon_.direct(directions);
  }
  // A finished bucket is sent while the next is updated; alone, all buckets are updated in one call.
  const bool alone = shards_.mesh().world.size() == 1;
  size_t next = 0;
  for (size_t bucket = 0; bucket < shards_.buckets(); ++bucket) {
    if (alone && bucket + 1 < shards_.buckets()) continue;
    apply(next, shards_.own_end(bucket), directions);
    next = shards_.own_end(bucket);
    shards_.gather(bucket);
  }
  if (losses.meanwhile) losses.meanwhile();
  UpdateResult result = control_.result(losses);
  if (!result.skipped) ++updates_;
  return result;
}

// Updates the shards [begin, end): those of AdamW in one call, but those of Muon, and those whose rounded masters serve their codes alone,
// one by one, to hold one direction or one rounded master.
void Optimizer::apply(size_t begin, size_t end, std::vector<Tensor>& directions) {
  std::vector<AdamW> together;
  std::vector<std::pair<const ParameterShard*, Tensor>> rounded;
  for (size_t i = begin; i < end; ++i) {
    const State& state = states_[i];
    const Parameter& of = *state.shard.of;
    if (!of.trained()) continue;
    const bool codes_alone = of.quantized && (!of.keeps_value || parameters_.value_is_master(of));
    const TraceSpan span(Track::module, of.name.c_str());
    const Tensor rounding = parameters_.rounding_target(state.shard);
    if (of.by_muon()) {
      Tensor direction = std::exchange(directions[i], {});
      if (muon_.alone()) muon_.direct(i, direction = momentum(state));
      update_by_muon(i, direction, rounding);
      parameters_.quantize(state.shard, rounding);
      continue;
    }
    const std::vector<AdamW> updates = by_adamw(state, rounding);
    if (codes_alone) {
      parameters_.device().run_all(std::span<const AdamW>(updates));
      parameters_.quantize(state.shard, rounding);
    } else {
      together.insert(together.end(), updates.begin(), updates.end());
      rounded.emplace_back(&state.shard, rounding);
    }
  }
  parameters_.device().run_all(std::span<const AdamW>(together));
  for (const auto& [shard, rounding] : rounded) parameters_.quantize(*shard, rounding);
}

// Rows of padding have moments of 0, which no number rounds to anything else.
std::vector<Optimizer::Run> Optimizer::runs(const ParameterShard& shard) const {
  const int64_t rows = shard.end - shard.begin;
  if (config_.moments != Dtype::bf16) return {{.begin = 0, .end = rows, .rounding = {}}};
  const Shape stored = shard.of->stored_shape();
  const int64_t columns = stored.with_dim0(1).elements();
  const auto before = static_cast<uint64_t>(updates_) * static_cast<uint64_t>(stored.elements());  // numbers of earlier updates
  std::vector<Run> out;
  for (const ParameterShard::Chunk& chunk : shard.chunks()) {
    out.push_back({.begin = chunk.begin - shard.begin,
                   .end = chunk.end - shard.begin,
                   .rounding = {.seed = seed_,
                                .what = shard.of->number(),
                                .first = before + static_cast<uint64_t>(chunk.row * columns + chunk.column),
                                .row_stride = shard.of->sharding.column_ranks() > 1 ? columns : 0}});
  }
  const int64_t padding = shard.stored_end() - shard.begin;
  if (padding < rows) out.push_back({.begin = padding, .end = rows, .rounding = {}});
  return out;
}

const Tensor& Optimizer::step_of(const State& state) const {
  const double factor = state.shard.of->training.lr_factor;
  return factor == 1.0 ? step_ : scaled_.at(factor);
}

double Optimizer::decay_of(const State& state) const {
  const ModuleTraining& training = state.shard.of->training;
  return state.shard.of->decays() ? training.weight_decay.value_or(config_.weight_decay) : 0.0;
}

// Returns the momentum of this step, as it is orthogonalized.
Tensor Optimizer::momentum(const State& state) const {
  const Tensor out = empty(parameters_.device(), muon_.dtype(), state.shard.shape()), gradient = state.shard.gradient();
  for (const auto& [begin, end, rounding] : runs(state.shard)) {
    parameters_.device().run(MuonMomentum{.m = state.first_moment.slice(begin, end),
                                          .grad = gradient.slice(begin, end),
                                          .step = step_,
                                          .out = out.slice(begin, end),
                                          .momentum = config_.muon.momentum,
                                          .nesterov = config_.muon.nesterov,
                                          .rounding = rounding});
  }
  return out;
}

void Optimizer::update_by_muon(size_t index, const Tensor& direction, const Tensor& rounding) const {
  const State& state = states_[index];
  for (const auto& [begin, end, scale] : muon_.parts(index)) {
    parameters_.device().run(MuonUpdate{.master = state.master.slice(begin, end),
                                        .direction = direction.slice(begin, end),
                                        .step = step_of(state),
                                        .scale = scale,
                                        .weight_decay = decay_of(state),
                                        .value = rounding.defined() ? rounding.slice(begin, end) : Tensor()});
  }
}

std::vector<AdamW> Optimizer::by_adamw(const State& state, const Tensor& rounding) const {
  const Tensor gradient = state.shard.gradient();
  std::vector<AdamW> out;
  for (const Run& run : runs(state.shard)) {
    const auto rows = [&](const Tensor& all) { return all.defined() ? all.slice(run.begin, run.end) : Tensor(); };
    out.push_back({.master = rows(state.master),
                   .m = rows(state.first_moment),
                   .v = rows(state.second_moment),
                   .grad = rows(gradient),
                   .step = step_of(state),
                   .beta1 = config_.beta1,
                   .beta2 = config_.beta2,
                   .eps = config_.eps,
                   .weight_decay = decay_of(state),
                   .value = rows(rounding),
                   .rounding = run.rounding});
  }
  return out;
}

Optimizer::Nonfinite Optimizer::first_nonfinite(Checked values) const {
  for (const State& state : states_) {
    if (values == Checked::gradients && !state.shard.of->trained()) continue;
    const std::string found =
        values == Checked::weights ? nonfinite_weight(state.shard, state.master) : nonfinite_text(state.shard, state.shard.gradient());
    if (found.empty()) continue;
    size_t parameter = 0;
    while (&parameters_.all()[parameter] != state.shard.of) ++parameter;
    const std::vector<ParameterShard::Chunk> chunks = state.shard.chunks();
    return {.text = found, .parameter = parameter, .row = chunks.empty() ? state.shard.begin : chunks.front().row};
  }
  return {};
}

double learning_rate(const ScheduleConfig& schedule, double peak, int64_t steps, int64_t step) {
  const int64_t warmup = schedule.warmup_steps;
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  if (schedule.type == ScheduleType::constant) return peak;
  const int64_t decay = std::max<int64_t>(1, schedule.decay_steps.value_or(steps - warmup));
  const int64_t start = schedule.type == ScheduleType::wsd ? std::max(warmup, steps - decay) : warmup;
  const double progress = std::clamp(static_cast<double>(step - start) / static_cast<double>(decay), 0.0, 1.0);
  const double low = peak * schedule.min_lr_ratio;
  const double left = schedule.type == ScheduleType::cosine ? 0.5 * (1.0 + std::cos(std::numbers::pi * progress)) : 1.0 - progress;
  return low + left * (peak - low);
}

}  // namespace mantissa
