// Allocates many tensors at once.
#pragma once

#include <utility>

#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {

// Returns how many elements a tensor takes of an arena: each begins at a multiple of 64 bytes, whatever its dtype.
inline int64_t arena_elements(int64_t elements) { return round_up(elements, 64); }

// Reserves every tensor first; then allocates the memory, zeroes it, and cuts it in the same order.
class Arena {
 public:
  explicit Arena(Dtype dtype) : dtype_(dtype) {}
  void reserve(const Shape& shape) { size_ += arena_elements(shape.elements()); }
  void allocate(Backend& device) { memory_ = size_ > 0 ? zeros(device, dtype_, {size_}) : Tensor(); }
  Tensor take(const Shape& shape) {
    const int64_t begin = std::exchange(next_, next_ + arena_elements(shape.elements()));
    return memory_.slice(begin, begin + shape.elements()).view(shape);
  }
  const Tensor& memory() const { return memory_; }  // undefined if nothing was reserved
  int64_t taken() const { return next_; }           // elements, where the next tensor begins

 private:
  Dtype dtype_;
  int64_t size_ = 0, next_ = 0;
  Tensor memory_;
};

}  // namespace mantissa
