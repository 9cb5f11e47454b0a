// Runs the three GEMMs of a linear operation y = x W^T, each on the operands its recipe asks for. Blocks run along the contraction of each
// GEMM: input and output gradient are rowwise in fprop and dgrad, columnwise in wgrad, which contracts over tokens. With a grouped weight
// of experts these are grouped GEMMs over the permuted tokens of a dispatch, [R, ..] where others have [N, ..].
#pragma once

#include <optional>

#include "mantissa/precision/operands.h"
#include "ops/exchange.h"
#include "ops/ops.h"
#include "ops/quantization_observer.h"

namespace mantissa {

// The input of a linear operation, as the GEMMs read it.
struct LinearInput {
  Tensor high{};              // [N, in]; undefined if only codes are needed
  QuantizedTensor codes{};    // rowwise, rows padded to whole blocks; undefined where fprop reads high precision
  QuantizedTensor columns{};  // columnwise from the values, if wgrad reads these and backward was announced
};

// The gradient of the output along both contractions.
struct OutputGradient {
  Value rows, columns;
};

class LinearGemms {
 public:
  LinearGemms(LinearWeight weight, const Recipe& recipe, Dispatch groups = {})
      : weight_(std::move(weight)), recipe_(recipe), groups_(std::move(groups)) {}

  // Returns the same for operands whose first row is this token of the micro batch, where they are a part of its rows.
  LinearGemms from_token(int64_t first) const {
    LinearGemms out = *this;
    out.first_token_ = first;
    return out;
  }

  LinearInput input(const Tensor& x, bool recorded) const;  // recorded: backward will read it
  // Gathers the input of all tokens from this rank's share, as codes if nothing else is read, to the same bits. Without sequence
  // parallelism it is input().
  LinearInput gathered_input(const TensorParallel& tp, const Tensor& x, bool recorded) const;
  // Returns what backward needs of an input that was recorded.
  LinearInput kept(const LinearInput& input) const;
  bool keeps_codes() const { return saved_input(recipe_) != SavedAs::values; }
  // Returns kept() of the input again, from its values.
  LinearInput kept_again(const Tensor& x) const { return kept(keeps_codes() ? input(x, true) : LinearInput{.high = x}); }

  // codes_of_tokens() quantizes rows [N, C] of tokens rowwise and shows them to the observer; gradient_of_codes() makes them the output
  // gradient of permuted tokens.
  QuantizedTensor codes_of_tokens(OperandRole role, const Tensor& x) const;
  OutputGradient gradient_of_codes(const QuantizedTensor& rows) const;

  void fprop(const LinearInput& x, const Tensor& bias, const Tensor& y) const;    // y [N, out]
  void backward(const LinearInput& x, const Tensor& dy, const Tensor& dx) const;  // dx [N, in], if defined
  void backward(const LinearInput& x, const OutputGradient& dy, const Tensor& dx) const;

 private:
  Dtype compute() const { return weight_.high.defined() ? weight_.high.dtype() : recipe_.compute; }
  // Multiplies a [N, K] by the weight as this GEMM reads it.
  void multiply(const Value& a, GemmRole role, const Tensor& out, const Tensor& bias) const;
  void observe(OperandRole role, const Tensor& x, const QuantizedTensor& codes) const;
  QuantizedTensor gathered_codes(const TensorParallel& tp, const Tensor& x, const Quantization& how) const;
  Value weight(GemmRole role) const;
  // Returns an operand [N, C] that is no codes, in the compute dtype: as it is or simulated. Rows of zeros may follow.
  Tensor read(GemmRole gemm, OperandRole role, const Tensor& high) const;
  Tensor simulated(const Simulation& how, GemmRole gemm, OperandRole role, const Tensor& high) const;
  OutputGradient output_gradient(const Tensor& dy, bool wants_rows) const;
  Value wgrad_input(const LinearInput& x) const;
  void wgrad(const LinearInput& x, const Value& dy) const;

  LinearWeight weight_;
  Recipe recipe_;
  Dispatch groups_;  // without offsets: one weight
  int64_t first_token_ = 0;
};

// Saves what backward reads of the input: the gathered input, its codes, the tensor, or the means to compute it again.
class SavedInput {
 public:
  SavedInput(const Var& x, const LinearInput& read, const LinearGemms& gemms, bool gathered) {
    if (gathered || (gemms.keeps_codes() && !x.rebuilt())) {
      kept_ = gemms.kept(read);
    } else {
      tensor_.emplace(x);
    }
  }
  LinearInput get(const LinearGemms& gemms) const { return tensor_ ? gemms.kept_again(tensor_->get()) : kept_; }

 private:
  LinearInput kept_;
  std::optional<Saved> tensor_;
};

}  // namespace mantissa
