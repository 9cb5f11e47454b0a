// Numeric gradient checks in fp64: the tape's gradients of sum(w * output), w random, against central differences.
#pragma once

#include <deque>

#include "testing.h"

namespace mantissa::test {

enum class Role { activation, parameter };

struct CheckedInput {
  std::string name;
  Tensor value;  // fp64
  Role role;
};

using Operation = std::function<Var(const std::vector<Var>&)>;

namespace detail {

// Gradients by input, in the inputs' order.
struct Gradients {
  std::vector<Tensor> of;
  std::deque<Leaf> leaves;  // one per input; activations leave theirs unused
};

inline void make_leaves(const std::vector<CheckedInput>& inputs, Gradients& gradients) {
  for (const CheckedInput& input : inputs) gradients.leaves.push_back({.grad = empty_like(input.value)});
}

// One forward and backward on a tape of its own. Leaves keep what they had, so a second call accumulates.
inline void run_tape(const std::vector<CheckedInput>& inputs, const Operation& operation, const Tensor& w, Gradients& gradients,
                     bool activations_are_constants) {
  Tape tape;
  const Tape::Scope scope(&tape);
  std::vector<Var> vars;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool parameter = inputs[i].role == Role::parameter;
    vars.push_back(parameter                   ? Var(inputs[i].value, gradients.leaves[i])
                   : activations_are_constants ? Var(inputs[i].value)
                                               : tape.input(inputs[i].value));
  }
  const Var out = operation(vars);
  tape.backward(out, w);
  gradients.of.assign(inputs.size(), {});
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].role == Role::parameter) {
      EXPECT_TRUE(gradients.leaves[i].written) << inputs[i].name;
      gradients.of[i] = gradients.leaves[i].grad;
    } else if (!activations_are_constants) {
      gradients.of[i] = tape.take_gradient(vars[i]);
    }
  }
}

// sum(w * output), or the output itself if it is the one number that backward starts from (w undefined).
inline double weighted_output(const std::vector<CheckedInput>& inputs, const Operation& operation, const Tensor& w) {
  std::vector<Var> vars;
  for (const CheckedInput& input : inputs) vars.emplace_back(input.value);
  const std::vector<double> out = values(operation(vars).value());
  if (!w.defined()) return out.at(0);
  const std::vector<double> weights = values(w);
  double sum = 0.0;
  for (size_t i = 0; i < out.size(); ++i) sum += weights[i] * out[i];
  return sum;
}

inline std::vector<double> numeric_gradient(const std::vector<CheckedInput>& inputs, size_t which, const Operation& operation,
                                            const Tensor& w) {
  const Tensor& x = inputs[which].value;
  std::vector<double> out;
  for (const double kept : values(x)) {
    const int64_t at = std::ssize(out);
    const double h = 1e-5 * std::max(1.0, std::abs(kept));
    set_value(x, at, kept + h);
    const double above = weighted_output(inputs, operation, w);
    set_value(x, at, kept - h);
    out.push_back((above - weighted_output(inputs, operation, w)) / (2.0 * h));
    set_value(x, at, kept);
  }
  return out;
}

}  // namespace detail

enum class Output { tensor, loss };  // loss: one number, backward starts from 1

// Checks every element of every input and parameter. Then that a second pass adds to parameter gradients and, if any parameter is there,
// that its gradient is the same when the activations are constants. The error of a central difference here is near h^2 = 1e-10 of the third
// derivative and 1e-11 of the sum, both far below the tolerance.
inline void expect_gradients(const std::vector<CheckedInput>& inputs, const Operation& operation, Output output = Output::tensor,
                             double tolerance = 1e-7) {
  std::vector<Var> plain;
  for (const CheckedInput& input : inputs) plain.emplace_back(input.value);
  const Tensor result = operation(plain).value();
  const Tensor w = output == Output::loss ? Tensor() : random_tensor(result.device(), Dtype::f64, result.shape(), 999);
  detail::Gradients gradients;
  detail::make_leaves(inputs, gradients);
  detail::run_tape(inputs, operation, w, gradients, false);
  std::vector<std::vector<double>> once;
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_TRUE(gradients.of[i].defined()) << inputs[i].name << " got no gradient";
    once.push_back(values(gradients.of[i]));
    EXPECT_TRUE(close(once[i], detail::numeric_gradient(inputs, i, operation, w), tolerance)) << "gradient of " << inputs[i].name;
  }
  detail::run_tape(inputs, operation, w, gradients, false);
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<double> expected = once[i];
    for (double& e : expected) e *= inputs[i].role == Role::parameter ? 2.0 : 1.0;
    EXPECT_TRUE(close(values(gradients.of[i]), expected, 1e-12)) << inputs[i].name << " after a second micro batch";
  }
  const auto is_parameter = [](const CheckedInput& input) { return input.role == Role::parameter; };
  if (std::none_of(inputs.begin(), inputs.end(), is_parameter)) return;
  detail::Gradients parameters_only;
  detail::make_leaves(inputs, parameters_only);
  detail::run_tape(inputs, operation, w, parameters_only, true);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_parameter(inputs[i])) continue;
    EXPECT_TRUE(close(values(parameters_only.of[i]), once[i], 1e-12)) << inputs[i].name << ", input constant";
  }
}

}  // namespace mantissa::test
