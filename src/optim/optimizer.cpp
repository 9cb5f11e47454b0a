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

Optimizer::Optimizer(ParameterSet& parameters, const OptimizerConfig& config, const Mesh& mesh, std::optional<int64_t> least_bucket)
    : parameters_(parameters), shards_(parameters, mesh, least_bucket), config_(config) {
  require(parameters.gradients().defined(), "optimizer: the parameters have no gradients");
  for (const ParameterShard& shard : shards_.own())
    states_.push_back({.shard = shard, .master = {}, .first_moment = {}, .second_moment = {}});
  const Dtype dtype = parameters_.master_dtype();
  Arena masters(dtype), first(dtype), second(dtype);
  for (const State& state : states_) {
    if (!parameters_.value_is_master(*state.shard.of)) masters.reserve(state.shard.shape());
    if (!state.shard.of->trained()) continue;
    first.reserve(state.shard.shape());
    second.reserve(state.shard.shape());
  }
  for (Arena* arena : {&masters, &first, &second}) arena->allocate(parameters_.device());
  for (State& state : states_) {
    const Shape shape = state.shard.shape();
    state.master = parameters_.value_is_master(*state.shard.of) ? parameters_.room_for_master(state.shard) : masters.take(shape);
    if (!state.shard.of->trained()) continue;
    state.first_moment = first.take(shape);
    state.second_moment = second.take(shape);
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
  // A finished bucket is sent while the next is updated; alone, all buckets are updated in one call.
  const bool alone = shards_.mesh().world.size() == 1;
  size_t next = 0;
  for (size_t bucket = 0; bucket < shards_.buckets(); ++bucket) {
    if (alone && bucket + 1 < shards_.buckets()) continue;
    apply(next, shards_.own_end(bucket));
    next = shards_.own_end(bucket);
    shards_.gather(bucket);
  }
  if (losses.meanwhile) losses.meanwhile();
  UpdateResult result = control_.result(losses);
  if (!result.skipped) ++updates_;
  return result;
}

// Updates the shards [begin, end). Those whose rounded masters serve their codes alone are updated one by one, to hold one of these.
void Optimizer::apply(size_t begin, size_t end) {
  std::vector<AdamW> together;
  std::vector<std::pair<const ParameterShard*, Tensor>> rounded;
  for (size_t i = begin; i < end; ++i) {
    const State& state = states_[i];
    const ModuleTraining& training = state.shard.of->training;
    if (training.frozen()) continue;
    const Parameter& of = *state.shard.of;
    const bool codes_alone = of.quantized && (!of.keeps_value || parameters_.value_is_master(of));
    const TraceSpan span(Track::module, of.name.c_str());
    const Tensor rounding = parameters_.rounding_target(state.shard);
    const AdamW update{.master = state.master,
                       .m = state.first_moment,
                       .v = state.second_moment,
                       .grad = state.shard.gradient(),
                       .step = training.lr_factor == 1.0 ? step_ : scaled_.at(training.lr_factor),
                       .beta1 = config_.beta1,
                       .beta2 = config_.beta2,
                       .eps = config_.eps,
                       .weight_decay = state.shard.of->decays() ? training.weight_decay.value_or(config_.weight_decay) : 0.0,
                       .value = rounding};
    if (codes_alone) {
      parameters_.device().run(update);
      parameters_.quantize(state.shard, rounding);
    } else {
      together.push_back(update);
      rounded.emplace_back(&state.shard, rounding);
    }
  }
  parameters_.device().run_all(std::span<const AdamW>(together));
  for (const auto& [shard, rounding] : rounded) parameters_.quantize(*shard, rounding);
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
