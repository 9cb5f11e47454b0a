// States what a kernel asks of its operands, at its struct in backend.h; Backend::run() checks it before every call.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>

#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

// Returns fp64 for fp64 values, else fp32: the dtype of statistics, losses and gradients that go with values of `dtype`.
inline Dtype stats_dtype(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

// Declares the operands of one call and checks each at once; throws Error(internal) with the kernel's and the operand's name.
//
// Dtype and shape are written as "[N, 2C]", "stats [N]", "i32 [1]?". The dtype is fp32, fp64 (of a sum, whatever the values are), i32, u8
// or
//   nothing    values: one of fp32, bf16 and fp64, the same for all of them
//   fp32|bf16  values that cannot be fp64
//   stats      stats_dtype() of the values
//   floating   fp32, bf16 or fp64, whatever the values are
//   any        also sums: nothing is computed from it
// A letter is a size and "..." any further dimensions, the same throughout the contract. With "?" the operand may be missing.
class Contract {
 public:
  enum class Role { input, output, in_place };
  struct Operand {
    const char* name;
    const Tensor* tensor;
    Role role;
    const char* spec;
  };

  explicit Contract(const char* kernel) : kernel_(kernel) { sizes_.fill(-1); }

  // An output shares no memory with any other operand; one in place may be all of an input of its dtype.
  Contract& input(const char* name, const Tensor& tensor, const char* spec) { return declare({name, &tensor, Role::input, spec}); }
  Contract& output(const char* name, const Tensor& tensor, const char* spec) { return declare({name, &tensor, Role::output, spec}); }
  Contract& in_place(const char* name, const Tensor& tensor, const char* spec) { return declare({name, &tensor, Role::in_place, spec}); }
  // Declares codes and scales, of the shapes that the format gives them.
  Contract& input(const char* name, const QuantizedTensor& tensor) { return declare(name, tensor, Role::input); }
  Contract& output(const char* name, const QuantizedTensor& tensor) { return declare(name, tensor, Role::output); }

  // Sets a letter's size before an operand has it, or reads it after one had.
  Contract& size(char letter, int64_t size);
  int64_t size(char letter) const { return sizes_.at(static_cast<size_t>(letter - 'A')); }

  template <class... Parts>
  Contract& that(bool ok, const Parts&... parts) {
    require(ok, kernel_, ": ", parts...);
    return *this;
  }

  const char* kernel() const { return kernel_; }
  std::span<const Operand> operands() const { return {operands_.data(), count_}; }  // without those that are missing
  int64_t bytes() const;                                                            // size of all operands, each once
  std::string text_of_operands() const;                                             // "x bf16 [256, 64], out bf16 [256, 96]"

  // Throws if values or stats are fp64, on behalf of the backend of this name.
  void refuse_fp64(const char* backend) const;

 private:
  struct Spec;
  Contract& declare(const Operand& operand);
  Contract& declare(const char* name, const QuantizedTensor& tensor, Role role);
  void add(const Operand& operand);
  bool takes(const Spec& spec, Dtype dtype);
  bool takes(const Spec& spec, const Shape& shape);
  std::optional<int64_t> known(char letter, int64_t factor) const;
  std::string expected(const Spec& spec) const;

  const char* kernel_;
  std::optional<Dtype> values_;
  const char* fp64_ = nullptr;     // the first operand of fp64 values or stats
  std::array<int64_t, 26> sizes_;  // by letter; -1: not known yet
  const Shape* rest_ = nullptr;    // whose dimensions from rest_from_ on "..." stands for
  int rest_from_ = 0;
  std::array<Operand, 12> operands_;
  size_t count_ = 0;
};

// Returns the bytes that a kernel reads and writes: those of every operand once, unless its struct knows better.
template <class Kernel>
int64_t bytes_moved(const Kernel& k, const Contract& contract) {
  if constexpr (requires { k.bytes_moved(); }) return k.bytes_moved();
  return contract.bytes();
}

}  // namespace mantissa
