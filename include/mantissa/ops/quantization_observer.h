// Shows what linear operations quantise to whoever wants statistics of it. Without an observer nothing is looked at.
#pragma once

#include <functional>

#include "mantissa/ops/ops.h"

namespace mantissa {

enum class OperandRole { weight, input, output_grad };
const char* role_name(OperandRole role);  // as in a recipe

// What an operation quantised from high precision: each operand once, also where it is recomputed or read by two products. Where dgrad and
// wgrad both read an output gradient as codes, these are the rowwise ones; codes shifted from others are not shown, nor columnwise ones of
// rows of experts, which hold padding.
struct QuantizedOperand {
  const Leaf* weight;            // gradient of the weight of the operation; null: it is not trained
  OperandRole role;              // input or output_grad
  const Tensor& x;               // [N, C]; what is quantised is its rounding to bf16
  const QuantizedTensor& codes;  // N rounded up to whole blocks
  bool own_tokens = false;       // of x [N, C] each rank that shares the weight has rows of its own: sequence parallelism
};

using QuantizationObserver = std::function<void(const QuantizedOperand&)>;

// Makes an observer that of this thread until the end of the block.
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
