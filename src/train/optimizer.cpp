#include "mantissa/train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "mantissa/nn/arena.h"
#include "mantissa/tensor/nonfinite.h"

namespace mantissa {
namespace {

int64_t norm_bands(const Tensor& gradient) { return (gradient.dim(0) + 31) / 32; }

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

double Optimizer::gradient_norm() {
  int64_t begin = 0;
  for (const Parameter& parameter : parameters_.all()) {
    const int64_t end = begin + norm_bands(parameter.leaf.grad);
    parameters_.device().run(SquaredNorm{.x = parameter.leaf.grad, .partials = partials_.slice(begin, end)});
    begin = end;
  }
  const double* partials = partials_.data<double>();
  return std::sqrt(std::accumulate(partials, partials + partials_.elements(), 0.0));
}

void Optimizer::set(StepValue index, double value) { step_.data<float>()[static_cast<int>(index)] = static_cast<float>(value); }

void Optimizer::update(const UpdateOptions& options) {
  if (!options.skip) ++updates_;
  const auto n = static_cast<double>(std::max<int64_t>(1, updates_));
  set(StepValue::lr, options.lr);
  set(StepValue::inverse_bias_correction1, 1.0 / (1.0 - std::pow(config_.beta1, n)));
  set(StepValue::inverse_bias_correction2, 1.0 / (1.0 - std::pow(config_.beta2, n)));
  const bool clips = config_.grad_clip > 0.0 && std::isfinite(options.gradient_norm);
  set(StepValue::clip_factor, clips ? std::min(1.0, config_.grad_clip / (options.gradient_norm + 1e-6)) : 1.0);
  set(StepValue::skip, options.skip ? 1.0 : 0.0);
  size_t i = 0;
  for (Parameter& parameter : parameters_.all()) {
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
    if (!options.skip) parameters_.quantise(parameter, rounding);
    ++i;
  }
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
