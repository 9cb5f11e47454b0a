#include "backend/contract.h"

namespace mantissa {

Contract& Contract::input(const char* operand, const Tensor& tensor) { return declare(operand, tensor, Role::input); }

Contract& Contract::input(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape) {
  return declare(operand, tensor, Role::input).has(operand, tensor, dtype, shape);
}

Contract& Contract::optional_input(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape) {
  return tensor.defined() ? input(operand, tensor, dtype, shape) : *this;
}

Contract& Contract::output(const char* operand, const Tensor& tensor) { return declare(operand, tensor, Role::output); }

Contract& Contract::output(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape) {
  return declare(operand, tensor, Role::output).has(operand, tensor, dtype, shape);
}

Contract& Contract::in_place(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape) {
  return declare(operand, tensor, Role::in_place).has(operand, tensor, dtype, shape);
}

Contract& Contract::input(const char* operand, const QuantizedTensor& tensor) { return declare(operand, tensor, Role::input); }

Contract& Contract::output(const char* operand, const QuantizedTensor& tensor) { return declare(operand, tensor, Role::output); }

Contract& Contract::input(const char* operand, const Value& value) {
  if (const auto* quantized = std::get_if<QuantizedTensor>(&value)) return input(operand, *quantized);
  const Tensor& tensor = std::get<Tensor>(value);
  return input(operand, tensor).floating(operand, tensor).rank(operand, tensor, 2);
}

Contract& Contract::optional_output(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape) {
  return tensor.defined() ? output(operand, tensor, dtype, shape) : *this;
}

Contract& Contract::has(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape) {
  return that(tensor.dtype() == dtype && tensor.shape() == shape, operand, " is ", tensor.dtype(), ' ', tensor.shape(), ", expected ",
              dtype, ' ', shape);
}

Contract& Contract::floating(const char* operand, const Tensor& tensor) {
  const bool integer = tensor.dtype() == Dtype::i32 || tensor.dtype() == Dtype::u8;
  return that(!integer, operand, " is ", tensor.dtype(), ", expected fp32, bf16 or fp64");
}

Contract& Contract::rank(const char* operand, const Tensor& tensor, int rank) {
  return that(tensor.shape().rank() == rank, operand, " is ", tensor.shape(), ", expected ", rank, " dimensions");
}

bool Contract::conflict(const Declared& a, const Declared& b) {
  if (a.role == Role::input && b.role == Role::input) return false;
  const bool apart = a.end <= b.begin || b.end <= a.begin || a.begin == a.end || b.begin == b.end;
  const bool same = a.begin == b.begin && a.end == b.end;
  const bool allowed = same && (a.role == Role::in_place) != (b.role == Role::in_place) && a.role != Role::output && b.role != Role::output;
  return !apart && !allowed;
}

Contract& Contract::declare(const char* operand, const Tensor& tensor, Role role) {
  that(tensor.defined(), operand, " is missing");
  const Declared added{operand, tensor.raw(), tensor.raw() + tensor.bytes(), role};
  for (size_t i = 0; i < count_; ++i) that(!conflict(declared_[i], added), operand, " overlaps ", declared_[i].name);
  declared_.at(count_++) = added;
  return *this;
}

Contract& Contract::declare(const char* operand, const QuantizedTensor& tensor, Role role) {
  that(bool{tensor.how}, operand, " has no format");
  declare(operand, tensor.codes, role).has(operand, tensor.codes, Dtype::u8, codes_shape(tensor.shape, tensor.how));
  return declare(operand, tensor.scales, role).has(operand, tensor.scales, Dtype::u8, scales_shape(tensor.shape, tensor.how));
}

}  // namespace mantissa
