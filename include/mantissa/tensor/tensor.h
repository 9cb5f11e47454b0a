// Defines Dtype, Shape and Tensor. A Tensor is a handle on contiguous row-major memory with an offset, so a slice along dim 0 is a view.
// There are no strides: transposition is a flag of the GEMM. Copying a Tensor copies the handle; the memory lives until the last handle is
// gone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <type_traits>

#include "mantissa/base/error.h"
#include "mantissa/formats/bf16.h"

namespace mantissa {

enum class Dtype : uint8_t { f32, bf16, f64, i32, u8 };

int64_t dtype_bytes(Dtype dtype);
const char* dtype_name(Dtype dtype);  // "fp32", "bf16", "fp64", "i32", "u8"
std::ostream& operator<<(std::ostream& out, Dtype dtype);

template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> : std::integral_constant<Dtype, Dtype::f32> {};
template <>
struct DtypeOf<bf16> : std::integral_constant<Dtype, Dtype::bf16> {};
template <>
struct DtypeOf<double> : std::integral_constant<Dtype, Dtype::f64> {};
template <>
struct DtypeOf<int32_t> : std::integral_constant<Dtype, Dtype::i32> {};
template <>
struct DtypeOf<uint8_t> : std::integral_constant<Dtype, Dtype::u8> {};

// Up to five dimensions, each >= 0. Rank 0 is a scalar with one element.
class Shape {
 public:
  static constexpr int kMaxRank = 5;
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  int rank() const { return rank_; }
  int64_t operator[](int dim) const;  // negative counts from the end
  int64_t elements() const;
  int64_t rows() const;  // product of all dimensions but the last
  Shape with_dim0(int64_t size) const;
  bool operator==(const Shape& other) const = default;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};
std::ostream& operator<<(std::ostream& out, const Shape& shape);

class Backend;

class Tensor {
 public:
  Tensor() = default;  // undefined: no memory, used for absent optional operands
  // Backends call this one. host_memory: the host may read and write the memory.
  Tensor(Backend& device, std::shared_ptr<std::byte> memory, bool host_memory, Dtype dtype, Shape shape);

  bool defined() const { return memory_ != nullptr; }
  // Returns the backend that owns the memory and runs the kernels on it. Throws if undefined.
  Backend& device() const;
  Dtype dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int64_t dim(int i) const { return shape_[i]; }
  int64_t elements() const { return shape_.elements(); }
  int64_t bytes() const { return elements() * dtype_bytes(dtype_); }

  // Returns the memory as T, for the host. Throws unless T is the dtype, and for memory that only a device can touch.
  template <class T>
  T* data() const {
    require(!defined() || host_memory_, "the memory of a tensor ", dtype_name(dtype_), " belongs to its device: the host reads a copy");
    return device_data<T>();
  }
  // Returns the same address for the kernels of its backend.
  template <class T>
  T* device_data() const {
    require(defined() && DtypeOf<T>::value == dtype_, "tensor is ", defined() ? dtype_name(dtype_) : "undefined", ", accessed as ",
            dtype_name(DtypeOf<T>::value));
    return reinterpret_cast<T*>(device_bytes());
  }
  std::byte* device_bytes() const { return memory_.get() + offset_; }
  // Returns true if this is the last handle of its memory, so that nobody misses what is overwritten.
  bool is_last_handle() const { return memory_.use_count() == 1; }

  // Return views. view() needs the same number of elements; slice() takes rows [begin, end) of dim 0; both throw otherwise.
  Tensor view(Shape shape) const;
  Tensor slice(int64_t begin, int64_t end) const;

 private:
  Backend* device_ = nullptr;
  std::shared_ptr<std::byte> memory_;
  int64_t offset_ = 0;  // bytes
  bool host_memory_ = false;
  Dtype dtype_ = Dtype::f32;
  Shape shape_;
};

// Finds NaN and Inf in floating-point values by their bits.

// Returns the index of the first value that is NaN or Inf; -1 if there is none, and for integers.
int64_t first_nonfinite(Dtype dtype, std::span<const std::byte> values);

}  // namespace mantissa
