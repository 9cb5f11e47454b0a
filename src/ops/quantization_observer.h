// Shows what linear operations quantize to a collector of statistics. Without an observer nothing is looked at.
#pragma once

#include <functional>
#include <span>

#include "ops/ops.h"

namespace mantissa {

enum class OperandRole { weight, input, output_grad };
constexpr const char* role_name(OperandRole role) {  // as in a recipe
  return role == OperandRole::weight ? "weight" : role == OperandRole::input ? "input" : "output_grad";
}

// An operand that an operation quantized from high precision: each once, even if it is recomputed or read by two GEMMs. Where dgrad and
// wgrad both read an output gradient as codes, these are the rowwise ones. Requantized codes are not shown, nor columnwise codes of
// permuted tokens, which hold padding. Simulated operands are shown by each GEMM that reads them, with their error alone. An operand of
// experts is shown matrix by matrix. Operands whose tokens are transformed together with padding are not shown.
struct QuantizedOperand {
  const Leaf* weight;            // gradient of the weight of the operation; null: it is not trained
  OperandRole role;              // weight: simulated
  const Tensor& x;               // [N, C]; what is quantized is its rounding to bf16
  const QuantizedTensor& codes;  // N rounded up to whole blocks; undefined if simulated
  Tensor rows{};                 // i32 [N] (optional): row i does not count where rows[i] is -1
  bool own_tokens = false;       // each rank that shares the weight has rows of its own in x [N, C]: sequence parallelism
  Tensor error{};                // fp64 [QuantizationError::size] if simulated; x is then not looked at
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

// Says on this thread, until the end of the block, which tokens of a micro batch are padding: their rows do not count.
class PaddingScope {
 public:
  // lengths: the tokens of each row of `length`, behind which is padding; empty: there is none.
  PaddingScope(std::span<const int32_t> lengths, int64_t length);
  ~PaddingScope();
  PaddingScope(const PaddingScope&) = delete;
  PaddingScope& operator=(const PaddingScope&) = delete;

  Tensor rows(Backend& device);  // QuantizedOperand::rows of the whole micro batch

 private:
  std::span<const int32_t> lengths_;
  int64_t length_;
  Tensor rows_;
  PaddingScope* previous_;
};

// Returns QuantizedOperand::rows of so many tokens of the micro batch; undefined where none is padding, and without an observer.
Tensor counted_rows(Backend& device, int64_t first, int64_t count);

}  // namespace mantissa
