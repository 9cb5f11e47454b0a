#include "mantissa/train/training_step.h"

#include <algorithm>
#include <cmath>

#include "mantissa/backend/functions.h"
#include "mantissa/train/device_batch.h"

namespace mantissa {
namespace {

double forward_and_backward(Gpt& model, const DeviceBatch& rows, int64_t target_count) {
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var loss = model.loss(rows.tokens, rows.targets, target_count);
  tape.backward(loss);
  return *loss.value().data<double>();
}

std::string first_bad_value(double loss, const ParameterSet& parameters) {
  if (!std::isfinite(loss)) return text("loss = ", loss);
  return first_nonfinite_gradient(parameters);
}

}  // namespace

StepResult training_step(Gpt& model, Optimizer& optimizer, GradientAccumulator& accumulator, const Batch& batch, int64_t micro_batch_size,
                         double lr) {
  // A batch without a target (everything masked) has loss 0 and no gradient.
  const int64_t targets = std::max<int64_t>(1, batch.target_count);
  StepResult result{.loss = 0.0, .gradient_norm = 0.0, .bad = {}};
  result.loss = accumulator.accumulate([&](int64_t i) {
    return forward_and_backward(model, to_device(model.device(), batch, i * micro_batch_size, micro_batch_size), targets);
  });
  result.gradient_norm = optimizer.gradient_norm();
  // Fake quantisation may turn a NaN weight into a number, and the loss with it.
  const bool bad_weights = model.parameters().nonfinite();
  const bool skip = bad_weights || !std::isfinite(result.loss) || !std::isfinite(result.gradient_norm);
  if (skip)
    result.bad = bad_weights ? first_nonfinite_weight(model.parameters(), optimizer) : first_bad_value(result.loss, model.parameters());
  optimizer.update({.lr = lr, .gradient_norm = result.gradient_norm, .skip = skip});
  return result;
}

}  // namespace mantissa
