// Runs the three GEMMs of a linear operation y = x W^T, each on the operands its recipe asks for. Blocks lie along the dimension over which
// a GEMM sums: rowwise for the input in fprop and the output gradient in dgrad, columnwise for both in wgrad, which sums over tokens. With
// a grouped weight of experts these are grouped GEMMs, and the rows are the permuted tokens of a dispatch: read [R, ..] for [N, ..] below.
#pragma once

#include <optional>

#include "mantissa/precision/operands.h"
#include "ops/exchange.h"
#include "ops/ops.h"
#include "ops/quantization_observer.h"

namespace mantissa {

// The input of a linear operation, as the GEMMs read it.
struct LinearInput {
  Tensor high{};              // [N, in]; undefined if rows traveled as codes, and in what kept() returns where codes are enough
  QuantizedTensor codes{};    // rowwise, rows padded to whole blocks; undefined where fprop reads high precision
  QuantizedTensor columns{};  // columnwise from the values, if the input was recorded and wgrad reads them (SavedAs::columns), or as
                              // transposes_columns() says
};

class LinearGemms {
 public:
  LinearGemms(LinearWeight weight, const LinearOperands& operands, Dispatch groups = {})
      : weight_(std::move(weight)), operands_(operands), groups_(std::move(groups)) {}

  // Returns a copy for a chunk of the micro batch's rows that begins at token `first`, so that padding is found (counted_rows()).
  LinearGemms from_token(int64_t first) const {
    LinearGemms out = *this;
    out.first_token_ = first;
    return out;
  }

  LinearInput input(const Tensor& x, bool recorded) const;  // recorded: backward will read it
  // Under sequence parallelism, all-gathers the rows of x, of which each rank has a share. They travel as codes if nothing reads their
  // values, else as values; fprop reads the same bits. Without sequence parallelism this is input().
  LinearInput gathered_input(const TensorParallel& tp, const Tensor& x, bool recorded) const;
  // Returns what backward needs of an input that was recorded.
  LinearInput kept(const LinearInput& input) const;
  bool keeps_codes() const { return operands_.saved_input != SavedAs::values; }

  // Quantizes rows [N, C] of tokens rowwise and shows them to the observer.
  QuantizedTensor codes_of_tokens(OperandRole role, const Tensor& x) const;

  void fprop(const LinearInput& x, const Tensor& bias, const Tensor& y) const;  // y [N, out]
  // Computes dx [N, in], if defined, and the gradient of the weight. dy [N, out]: values, or rowwise codes of codes_of_tokens().
  void backward(const LinearInput& x, const Value& dy, const Tensor& dx) const;

 private:
  struct OutputGradient {  // along both contractions
    Value rows, columns;
  };

  Dtype compute() const { return weight_.high.defined() ? weight_.high.dtype() : operands_.compute; }
  // Multiplies a [N, K] by the weight as this GEMM reads it.
  void multiply(const Value& a, GemmRole role, const Tensor& out, const Tensor& bias) const;
  void observe(OperandRole role, const Tensor& x, const QuantizedTensor& codes) const;
  // Makes the weight operand of this GEMM: the values, the resident codes, or codes along columns, which each call computes anew.
  Value weight(GemmRole role) const;
  // Returns an operand [N, C] that this GEMM reads as values, in the compute dtype: unchanged, or rounded to a simulated format. Rows of
  // zeros are appended where a transform over rows needs whole blocks.
  Tensor read(GemmRole gemm, OperandRole role, const Tensor& high) const;
  // Returns true if columnwise codes are to be made as rowwise ones of the transposes, which wgrad then reads as they lie.
  bool transposes_columns() const;
  OutputGradient output_gradient(const Value& dy, bool wants_rows) const;
  void wgrad(const LinearInput& x, const Value& dy) const;

  LinearWeight weight_;
  LinearOperands operands_;
  Dispatch groups_;  // without offsets: one weight
  int64_t first_token_ = 0;
};

// Saves what backward reads of the input: the gathered input, its codes, the tensor, or the means to compute it again.
class SavedInput {
 public:
  SavedInput() = default;  // nothing: the weight is not trained
  SavedInput(const Var& x, const LinearInput& read, const LinearGemms& gemms, bool gathered) {
    if (gathered || (gemms.keeps_codes() && !x.rebuilt())) {
      kept_ = gemms.kept(read);
    } else {
      tensor_.emplace(x);
    }
  }
  LinearInput get(const LinearGemms& gemms) const {
    if (!tensor_) return kept_;
    const Tensor x = tensor_->get();
    return gemms.kept(gemms.keeps_codes() ? gemms.input(x, true) : LinearInput{.high = x});
  }

 private:
  LinearInput kept_;
  std::optional<Saved> tensor_;
};

}  // namespace mantissa
