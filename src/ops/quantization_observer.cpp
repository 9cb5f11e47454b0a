#include "ops/quantization_observer.h"

#include <utility>
#include <vector>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

thread_local const QuantizationObserver* current_observer = nullptr;
thread_local PaddingScope* current_padding = nullptr;

}  // namespace

ObserverScope::ObserverScope(QuantizationObserver observer)
    : observer_(std::move(observer)), previous_(std::exchange(current_observer, &observer_)) {}
ObserverScope::~ObserverScope() { current_observer = previous_; }

void observe_quantization(const QuantizedOperand& operand) {
  if (current_observer) (*current_observer)(operand);
}

bool observing_quantization() { return current_observer != nullptr; }

PaddingScope::PaddingScope(std::span<const int32_t> lengths, int64_t length)
    : lengths_(lengths), length_(length), previous_(std::exchange(current_padding, lengths.empty() ? nullptr : this)) {}
PaddingScope::~PaddingScope() { current_padding = previous_; }

Tensor PaddingScope::rows(Backend& device) {
  if (rows_.defined()) return rows_;
  std::vector<int32_t> out;
  for (const int32_t length : lengths_) {
    out.insert(out.end(), static_cast<size_t>(length), 0);
    out.insert(out.end(), static_cast<size_t>(length_ - length), -1);
  }
  rows_ = from_host(device, Dtype::i32, {std::ssize(out)}, out.data());
  return rows_;
}

Tensor counted_rows(Backend& device, int64_t first, int64_t count) {
  if (!current_padding || !observing_quantization()) return {};
  return current_padding->rows(device).slice(first, first + count);
}

}  // namespace mantissa
