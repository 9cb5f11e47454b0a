// Shows what linear operations quantize to a collector of statistics. Without an observer nothing is looked at.
#pragma once

#include <functional>

#include "mantissa/ops/ops.h"

namespace mantissa {

enum class OperandRole { weight, input, output_grad };
const char* role_name(OperandRole role);  // as in a recipe

// An operand that an operation quantized from high precision: each once, even if it is recomputed or read by two GEMMs. Where dgrad and
// wgrad both read an output gradient as codes, these are the rowwise ones. Requantized codes are not shown, nor columnwise codes of
// permuted tokens, which hold padding. Simulated operands are shown by each GEMM that reads them, with their error alone. An operand of
// experts is shown matrix by matrix, unless tokens are transformed together with padding.
struct QuantizedOperand {
  const Leaf* weight;            // gradient of the weight of the operation; null: it is not trained
  OperandRole role;              // weight: simulated
  const Tensor& x;               // [N, C]; what is quantized is its rounding to bf16
  const QuantizedTensor& codes;  // N rounded up to whole blocks; undefined if simulated
  Tensor rows{};                 // i32 [N] (optional): row i does not count where rows[i] is -1
  bool own_tokens = false;       // of x [N, C] each rank that shares the weight has rows of its own: sequence parallelism
  Tensor error{};                // fp64 [QuantizationError::size] if simulated, of which x is not looked at
};

using QuantizationObserver = std::function<void(const QuantizedOperand&)>;

// Installs an observer on this thread until the end of the block.
class ObserverScope {
 public:
  explicit ObserverScope(QuantizationObserver observer);
  ~ObserverScope();
  ObserverScope(const ObserverScope&) = delete;
  ObserverScope& operator=(const ObserverScope&) = delete;

 private:
  QuantizationObserver observer_;
  const QuantizationObserver* previous_;
};

void observe_quantization(const QuantizedOperand& operand);  // no-op without an observer
bool observing_quantization();

}  // namespace mantissa
