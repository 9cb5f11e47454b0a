#include "mantissa/train/optimizer.h"

#include <array>
#include <cmath>

#include "mantissa/base/integers.h"
#include "mantissa/nn/arena.h"

namespace mantissa {
namespace {

int64_t norm_bands(const Tensor& gradient) { return ceil_div(gradient.dim(0), 32); }

}  // namespace

Optimizer::Optimizer(ParameterSet& parameters, const OptimizerConfig& config) : parameters_(parameters), config_(config) {
  require(parameters.gradients().defined(), "optimizer: the parameters have no gradients");
  allocate_masters();
  const Tensor first = parameters.new_gradient_buffer(), second = parameters.new_gradient_buffer();
  int64_t bands = 0;
  for (size_t i = 0; i < parameters.all().size(); ++i) {
    first_.push_back(parameters.view_of(first, i));
    second_.push_back(parameters.view_of(second, i));
    bands += norm_bands(first_[i]);
  }
  partials_ = empty(parameters.device(), Dtype::f64, {bands});
  step_ = zeros(parameters.device(), Dtype::f32, {static_cast<int64_t>(StepValue::count)});
  outcome_ = zeros(parameters.device(), Dtype::f64, {static_cast<int64_t>(StepOutcome::count)});
}

void Optimizer::allocate_masters() {
  Arena arena(parameters_.master_dtype());
  for (const Parameter& parameter : parameters_.all()) {
    if (!parameters_.value_is_master(parameter)) arena.reserve(parameter.shape);
  }
  arena.allocate(parameters_.device());
  for (const Parameter& parameter : parameters_.all()) {
    masters_.push_back(parameters_.value_is_master(parameter) ? parameter.value : arena.take(parameter.shape));
  }
}

void Optimizer::initialise(uint64_t seed) {
  for (size_t i = 0; i < masters_.size(); ++i) parameters_.draw_initial(i, seed, masters_[i]);
  store_masters();
}

void Optimizer::store_masters() {
  parameters_.clear_nonfinite();
  size_t i = 0;
  for (const Parameter& parameter : parameters_.all()) parameters_.store(parameter, masters_[i++]);
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
  for (const Parameter& parameter : parameters_.all()) {
    const int64_t end = begin + norm_bands(parameter.leaf.grad);
    device.run(SquaredNorm{.x = parameter.leaf.grad, .partials = partials_.slice(begin, end)});
    begin = end;
  }
  device.run(FinishGradients{.partials = partials_,
                             .losses = losses.losses,
                             .flags = parameters_.nonfinite(),
                             .step = step_,
                             .outcome = outcome_,
                             .clip = config_.grad_clip,
                             .pairwise = losses.pairwise});
}

void Optimizer::apply() {
  size_t i = 0;
  for (const Parameter& parameter : parameters_.all()) {
    const Tensor rounding = parameters_.rounding_target(parameter);
    parameters_.device().run(AdamW{.master = masters_[i],
                                   .m = first_[i],
                                   .v = second_[i],
                                   .grad = parameter.leaf.grad,
                                   .step = step_,
                                   .beta1 = config_.beta1,
                                   .beta2 = config_.beta2,
                                   .eps = config_.eps,
                                   .weight_decay = parameter.decays() ? config_.weight_decay : 0.0,
                                   .value = rounding});
    parameters_.quantise(parameter, rounding);
    ++i;
  }
}

UpdateResult Optimizer::update(double lr, const StepLosses& losses) {
  finish_gradients(lr, losses);
  apply();
  const std::vector<double> outcome = to_host<double>(outcome_);
  const auto get = [&](StepOutcome index) { return outcome[static_cast<size_t>(index)]; };
  const UpdateResult result{.loss = get(StepOutcome::loss),
                            .gradient_norm = get(StepOutcome::gradient_norm),
                            .bad_weights = get(StepOutcome::bad_weights) != 0.0,
                            .skipped = get(StepOutcome::skip) != 0.0};
  if (!result.skipped) ++updates_;
  return result;
}

std::string first_nonfinite_gradient(const ParameterSet& parameters) {
  for (const Parameter& parameter : parameters.all()) {
    std::string found = nonfinite_text(parameter.name, parameter.leaf.grad);
    if (!found.empty()) return found;
  }
  return "";
}

std::string first_nonfinite_weight(const ParameterSet& parameters, const Optimizer& optimizer) {
  size_t i = 0;
  for (const Parameter& parameter : parameters.all()) {
    std::string found = nonfinite_weight(parameter, optimizer.master(i++));
    if (!found.empty()) return found;
  }
  return "";
}

}  // namespace mantissa
