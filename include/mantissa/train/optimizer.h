// AdamW over all parameters of a model, with the global gradient norm and its clipping. Nothing is allocated after construction.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mantissa/nn/parameter.h"
#include "mantissa/train/config.h"

namespace mantissa {

struct UpdateOptions {
  double lr;
  double gradient_norm;  // as gradient_norm() returned it
  bool skip;             // the gradient is not finite: parameters, moments and the update counter stay as they are
};

class Optimizer {
 public:
  // The moments start at 0. The set must be allocated with gradients and outlive the optimizer.
  Optimizer(ParameterSet& parameters, const OptimizerConfig& config);

  // L2 norm of all gradients, summed in fp64 per 32 rows, then in parameter order. NaN or Inf if and only if an element is.
  double gradient_norm();

  // Update number updates() + 1: gradients are scaled by min(1, grad_clip / (norm + 1e-6)), as torch's clip_grad_norm_ does; decay applies
  // to parameters of two or more dimensions.
  void update(const UpdateOptions& options);

  // How often the parameters were updated; the bias corrections follow it.
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }

  // First and second moment of parameter i, in its shape.
  const Tensor& first_moment(size_t i) const { return first_[i]; }
  const Tensor& second_moment(size_t i) const { return second_[i]; }

 private:
  void set(StepValue index, double value);

  ParameterSet& parameters_;
  OptimizerConfig config_;
  int64_t updates_ = 0;
  std::vector<Tensor> first_, second_;  // views of two arenas
  std::vector<Tensor> partials_;        // by parameter: squared norm of each 32 rows, fp64
  Tensor step_;                         // StepValue
};

// "layers.0.mlp.down.weight[1234] = nan": the first gradient element that is not finite; "" if all are.
std::string first_nonfinite_gradient(const ParameterSet& parameters);

}  // namespace mantissa
