// How checks.h states what a kernel asks of its operands. Every violation throws Error(internal) with the kernel's and the operand's name.
#pragma once

#include <array>

#include "mantissa/backend/backend.h"
#include "mantissa/backend/functions.h"

namespace mantissa {

// One per check. Each operand is declared once; an output is compared with all operands declared before it, and an input with all outputs,
// so that memory shared against the rules is found whatever the order.
class Contract {
 public:
  explicit Contract(const char* kernel) : kernel_(kernel) {}

  Contract& input(const char* operand, const Tensor& tensor);
  Contract& input(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape);
  Contract& optional_input(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape);
  Contract& output(const char* operand, const Tensor& tensor);
  Contract& output(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape);
  // An output that may be one of the inputs, all of it.
  Contract& in_place(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape);

  // Codes and scales, of the shapes that `how` gives them.
  Contract& input(const char* operand, const QuantizedTensor& tensor);
  Contract& output(const char* operand, const QuantizedTensor& tensor);
  Contract& input(const char* operand, const Value& value);
  Contract& optional_output(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape);

  // About an operand declared before.
  Contract& has(const char* operand, const Tensor& tensor, Dtype dtype, Shape shape);
  Contract& floating(const char* operand, const Tensor& tensor);
  Contract& rank(const char* operand, const Tensor& tensor, int rank);

  template <class... Parts>
  Contract& that(bool ok, const Parts&... parts) {
    require(ok, kernel_, ": ", parts...);
    return *this;
  }

 private:
  enum class Role { input, output, in_place };
  struct Declared {
    const char* name;
    const std::byte *begin, *end;
    Role role;
  };
  Contract& declare(const char* operand, const Tensor& tensor, Role role);
  Contract& declare(const char* operand, const QuantizedTensor& tensor, Role role);
  static bool conflict(const Declared& a, const Declared& b);

  const char* kernel_;
  std::array<Declared, 12> declared_{};
  size_t count_ = 0;
};

}  // namespace mantissa
