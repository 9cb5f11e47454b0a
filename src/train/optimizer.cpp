#include "mantissa/train/optimizer.h"

#include <array>
#include <cmath>
#include <numeric>

#include "mantissa/base/integers.h"
#include "mantissa/nn/arena.h"

namespace mantissa {
namespace {

int64_t norm_bands(const Part& part) { return ceil_div(part.end - part.begin, 32); }

}  // namespace

Optimizer::Optimizer(ParameterSet& parameters, const OptimizerConfig& config, Shards shards)
    : parameters_(parameters), shards_(std::move(shards)), config_(config) {
  require(parameters.gradients().defined(), "optimizer: the parameters have no gradients");
  int64_t bands = 0;
  for (const Part& part : shards_.own()) {
    states_.push_back({.part = part, .master = {}, .first_moment = {}, .second_moment = {}});
    bands += norm_bands(part);
  }
  allocate();
  partials_ = empty(parameters.device(), Dtype::f64, {bands});
  step_ = zeros(parameters.device(), Dtype::f32, {static_cast<int64_t>(StepValue::count)});
  outcome_ = zeros(parameters.device(), Dtype::f64, {static_cast<int64_t>(StepOutcome::count)});
}

void Optimizer::allocate() {
  const Dtype dtype = parameters_.master_dtype();
  Arena masters(dtype), first(dtype), second(dtype);
  for (const State& state : states_) {
    if (!parameters_.value_is_master(*state.part.of)) masters.reserve(state.part.shape());
    first.reserve(state.part.shape());
    second.reserve(state.part.shape());
  }
  for (Arena* arena : {&masters, &first, &second}) arena->allocate(parameters_.device());
  for (State& state : states_) {
    const Shape shape = state.part.shape();
    state.master = parameters_.value_is_master(*state.part.of) ? parameters_.room_for_master(state.part) : masters.take(shape);
    state.first_moment = first.take(shape);
    state.second_moment = second.take(shape);
  }
}

void Optimizer::initialise(uint64_t seed) {
  for (const State& state : states_) parameters_.draw_initial(state.part, seed, state.master);
  store_masters();
}

void Optimizer::store_masters() {
  parameters_.clear_nonfinite();
  for (const State& state : states_) parameters_.store(state.part, state.master);
  shards_.gather();
}

void Optimizer::finish_gradients(double lr, const StepLosses& losses) {
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
    const int64_t end = begin + norm_bands(state.part);
    device.run(SquaredNorm{.x = state.part.gradient(), .partials = partials_.slice(begin, end)});
    begin = end;
  }
  device.run(exchanged(losses));
}

// With the partial norms, losses and flags of all ranks, in one message: every rank then decides the same.
FinishGradients Optimizer::exchanged(const StepLosses& losses) const {
  FinishGradients finish{.partials = partials_,
                         .losses = losses.losses,
                         .flags = parameters_.nonfinite(),
                         .step = step_,
                         .outcome = outcome_,
                         .clip = config_.grad_clip,
                         .pairwise = losses.pairwise};
  const Communicator& data = shards_.data();
  if (data.size() == 1) return finish;
  std::vector<int64_t> counts;
  for (int r = 0; r < data.size(); ++r) counts.push_back(1 + losses.losses.elements() + shards_.norm_bands(r));
  std::vector<double> all(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
  auto own = all.begin() + std::accumulate(counts.begin(), counts.begin() + data.rank(), int64_t{0});
  *own++ = to_host<int32_t>(parameters_.nonfinite())[0];
  own = std::ranges::copy(to_host<double>(losses.losses), own).out;
  std::ranges::copy(to_host<double>(partials_), own);
  std::vector<int64_t> bytes = counts;
  for (int64_t& count : bytes) count *= static_cast<int64_t>(sizeof(double));
  data.all_gather(std::as_writable_bytes(std::span(all)), bytes, Purpose::control);

  std::vector<int32_t> flags;
  std::vector<double> all_losses;
  std::vector<std::vector<double>> partials;
  auto next = all.cbegin();
  for (const int64_t count : counts) {
    const auto end = next + count;
    flags.push_back(*next++ != 0.0 ? 1 : 0);
    all_losses.insert(all_losses.end(), next, next + losses.losses.elements());
    partials.emplace_back(next + losses.losses.elements(), end);
    next = end;
  }
  Backend& device = parameters_.device();
  const auto on_device = [&](const std::vector<double>& values) {
    return from_host(device, Dtype::f64, {static_cast<int64_t>(values.size())}, values.data());
  };
  finish.partials = on_device(shards_.in_order(partials));
  finish.losses = on_device(all_losses);
  finish.flags = from_host(device, Dtype::i32, {static_cast<int64_t>(flags.size())}, flags.data());
  return finish;
}

void Optimizer::apply() {
  for (const State& state : states_) {
    const Tensor rounding = parameters_.rounding_target(state.part);
    parameters_.device().run(AdamW{.master = state.master,
                                   .m = state.first_moment,
                                   .v = state.second_moment,
                                   .grad = state.part.gradient(),
                                   .step = step_,
                                   .beta1 = config_.beta1,
                                   .beta2 = config_.beta2,
                                   .eps = config_.eps,
                                   .weight_decay = state.part.of->decays() ? config_.weight_decay : 0.0,
                                   .value = rounding});
    parameters_.quantise(state.part, rounding);
  }
}

UpdateResult Optimizer::update(double lr, const StepLosses& losses) {
  shards_.reduce_gradients();
  finish_gradients(lr, losses);
  apply();
  shards_.gather();
  const std::vector<double> outcome = to_host<double>(outcome_);
  const auto get = [&](StepOutcome index) { return outcome[static_cast<size_t>(index)]; };
  const UpdateResult result{.loss = get(StepOutcome::loss),
                            .gradient_norm = get(StepOutcome::gradient_norm),
                            .bad_weights = get(StepOutcome::bad_weights) != 0.0,
                            .skipped = get(StepOutcome::skip) != 0.0};
  if (!result.skipped) ++updates_;
  return result;
}

std::string Optimizer::first_nonfinite_gradient() const {
  for (const State& state : states_) {
    std::string found = nonfinite_text(state.part.of->name, state.part.gradient(), state.part.first_element());
    if (!found.empty()) return found;
  }
  return "";
}

std::string Optimizer::first_nonfinite_weight() const {
  for (const State& state : states_) {
    std::string found = nonfinite_weight(state.part, state.master);
    if (!found.empty()) return found;
  }
  return "";
}

}  // namespace mantissa
