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

Contract& Contract::has(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape) {
  return that(tensor.dtype() == dtype && tensor.shape() == shape, operand, " is ", tensor.dtype(), ' ', tensor.shape(), ", expected ",
              dtype, ' ', shape);
}

Contract& Contract::floating(const char* operand, const Tensor& tensor) {
  return that(tensor.dtype() != Dtype::i32, operand, " is i32, expected fp32, bf16 or fp64");
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

}  // namespace mantissa
