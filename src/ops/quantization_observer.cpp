#include "mantissa/ops/quantization_observer.h"

#include <utility>

namespace mantissa {
namespace {

thread_local const QuantizationObserver* current_observer = nullptr;

}  // namespace

const char* role_name(OperandRole role) {
  switch (role) {
    case OperandRole::weight: return "weight";
    case OperandRole::input: return "input";
    case OperandRole::output_grad: return "output_grad";
  }
  fail(ExitCode::internal, "no such role");
}

ObserverScope::ObserverScope(QuantizationObserver observer)
    : observer_(std::move(observer)), previous_(std::exchange(current_observer, &observer_)) {}
ObserverScope::~ObserverScope() { current_observer = previous_; }

void observe_quantization(const QuantizedOperand& operand) {
  if (current_observer) (*current_observer)(operand);
}

bool observing_quantization() { return current_observer != nullptr; }

}  // namespace mantissa
