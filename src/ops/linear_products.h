// The three products of a linear operation y = x W^T, each on the operands its recipe asks for. Blocks run along the contraction of each
// product: input and output gradient are rowwise in fprop and dgrad, columnwise in wgrad, which contracts over tokens. Of a stack of
// weights, one for each expert, they are grouped products: rows are those of a dispatch, [R, ..] where others are [N, ..].
#pragma once

#include <optional>

#include "mantissa/ops/ops.h"
#include "mantissa/ops/quantization_observer.h"
#include "mantissa/precision/operands.h"
#include "ops/exchange.h"

namespace mantissa {

// The input of a linear operation, as some product reads it.
struct LinearInput {
  Tensor high{};            // [N, in]; undefined if only codes are needed
  QuantizedTensor codes{};  // rowwise, rows padded to whole blocks; undefined where fprop reads high precision
};

// The gradient of the output along both contractions.
struct OutputGradient {
  Value rows, columns;
};

class LinearProducts {
 public:
  LinearProducts(LinearWeight weight, const Recipe& recipe, Dispatch groups = {})
      : weight_(std::move(weight)), recipe_(recipe), groups_(std::move(groups)) {}

  LinearInput input(const Tensor& x) const;
  // Of this rank's share of tokens: the input of all, gathered as codes if nobody reads more, to the same bits. Without sequence
  // parallelism input(x). recorded: backward will read it.
  LinearInput gathered_input(const Place& place, const Tensor& x, bool recorded) const;
  // What backward needs of an input: the codes where wgrad derives its operand from them, else the tensor.
  LinearInput kept(const LinearInput& input) const;
  bool keeps_codes() const { return saves_input_codes(recipe_); }

  // Rows [N, C] of tokens as rowwise codes, told to the observer; and rows of experts as an output gradient.
  QuantizedTensor codes_of_tokens(OperandRole role, const Tensor& x) const;
  OutputGradient gradient_of_codes(const QuantizedTensor& rows) const;

  void fprop(const LinearInput& x, const Tensor& bias, const Tensor& y) const;    // y [N, out]
  void backward(const LinearInput& x, const Tensor& dy, const Tensor& dx) const;  // dx [N, in], if defined
  void backward(const LinearInput& x, const OutputGradient& dy, const Tensor& dx) const;

 private:
  Dtype compute() const { return weight_.high.defined() ? weight_.high.dtype() : recipe_.compute; }
  // a [N, K] times the weight as this product reads it.
  void multiply(const Value& a, GemmRole role, const Tensor& out, const Tensor& bias) const;
  void observe(OperandRole role, const Tensor& x, const QuantizedTensor& codes) const;
  QuantizedTensor gathered_codes(const Place& place, const Tensor& x, const Quantization& how) const;
  Value weight(GemmRole role) const;
  Value wgrad_input(const LinearInput& x) const;
  void wgrad(const LinearInput& x, const Value& dy) const;

  LinearWeight weight_;
  Recipe recipe_;
  Dispatch groups_;  // without offsets: one weight
};

// What backward reads of the input: what was gathered, its codes, or the tensor, or the means to compute that again.
class SavedInput {
 public:
  SavedInput(const Var& x, const LinearInput& read, const LinearProducts& products, bool gathered) {
    if (gathered || (products.keeps_codes() && !x.rebuilt())) {
      kept_ = products.kept(read);
    } else {
      tensor_.emplace(x);
    }
  }
  LinearInput get(const LinearProducts& products) const { return tensor_ ? products.kept(products.input(tensor_->get())) : kept_; }

 private:
  LinearInput kept_;
  std::optional<Saved> tensor_;
};

}  // namespace mantissa
