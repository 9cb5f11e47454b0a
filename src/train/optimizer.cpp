#include "mantissa/train/optimizer.h"

#include <algorithm>
#include <cmath>

#include "mantissa/backend/functions.h"
#include "mantissa/tensor/nonfinite.h"

namespace mantissa {

Optimizer::Optimizer(ParameterSet& parameters, const OptimizerConfig& config) : parameters_(parameters), config_(config) {
  require(parameters.gradients().defined(), "optimizer: the parameters have no gradients");
  const Tensor first = parameters.new_gradient_buffer(), second = parameters.new_gradient_buffer();
  for (size_t i = 0; i < parameters.all().size(); ++i) {
    first_.push_back(parameters.view_of(first, i));
    second_.push_back(parameters.view_of(second, i));
    partials_.push_back(empty(first.device(), Dtype::f64, {(first_[i].dim(0) + 31) / 32}));
  }
  step_ = zeros(first.device(), Dtype::f32, {static_cast<int64_t>(StepValue::count)});
}

double Optimizer::gradient_norm() {
  double sum = 0.0;
  size_t i = 0;
  for (const Parameter& parameter : parameters_.all()) {
    const Tensor& partials = partials_[i++];
    partials.device().run(SquaredNorm{.x = parameter.leaf.grad, .partials = partials});
    for (int64_t tile = 0; tile < partials.elements(); ++tile) sum += partials.data<double>()[tile];
  }
  return std::sqrt(sum);
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
    parameter.master.device().run(AdamW{.master = parameter.master,
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

}  // namespace mantissa
