// The three products of a linear operation y = x W^T, each on the operands its recipe asks for. Blocks run along the contraction of each
// product: input and output gradient are rowwise in fprop and dgrad, columnwise in wgrad, which contracts over tokens.
#pragma once

#include "mantissa/ops/ops.h"
#include "mantissa/precision/operands.h"
#include "ops/exchange.h"

namespace mantissa {

// The input of a linear operation, as some product reads it.
struct LinearInput {
  Tensor high{};            // [N, in]; undefined if only codes are needed
  QuantizedTensor codes{};  // rowwise, rows padded to whole blocks; undefined where fprop reads high precision
};

class LinearProducts {
 public:
  LinearProducts(LinearWeight weight, const Recipe& recipe) : weight_(std::move(weight)), recipe_(recipe) {}

  LinearInput input(const Tensor& x) const;
  // Of this rank's share of tokens: the input of all, gathered as codes if nobody reads more, to the same bits. Without sequence
  // parallelism input(x). recorded: backward will read it.
  LinearInput gathered_input(const Place& place, const Tensor& x, bool recorded) const;
  // What backward needs of an input: the codes where wgrad derives its operand from them, else the tensor.
  LinearInput kept(const LinearInput& input) const;
  bool keeps_codes() const { return saves_input_codes(recipe_); }

  void fprop(const LinearInput& x, const Tensor& bias, const Tensor& y) const;    // y [N, out]
  void backward(const LinearInput& x, const Tensor& dy, const Tensor& dx) const;  // dx [N, in], if defined

 private:
  Dtype compute() const { return weight_.high.defined() ? weight_.high.dtype() : recipe_.compute; }
  QuantizedTensor gathered_codes(const Place& place, const Tensor& x, const Quantization& how) const;
  Value weight(GemmRole role) const;
  Value wgrad_input(const LinearInput& x) const;
  void wgrad(const LinearInput& x, const Value& dy) const;

  LinearWeight weight_;
  Recipe recipe_;
};

}  // namespace mantissa
