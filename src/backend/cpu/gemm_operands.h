// Operands of GEMMs: groups of rows, each with its matrix of a grouped weight, as GroupedGemm and GroupedWeightGradient take them, and codes
// as the values that they stand for.
#pragma once

#include "mantissa/backend/functions.h"

namespace mantissa {

struct Group {
  int64_t begin, end;  // its rows
  int64_t rows() const { return end - begin; }
};

class Groups {
 public:
  // Throws Error(internal) unless offsets begin with 0, never descend and end within `rows`.
  Groups(const char* kernel, const Tensor& offsets, int64_t rows);

  int64_t count() const { return count_; }
  Group operator[](int64_t g) const { return {offsets_[g], offsets_[g + 1]}; }
  int64_t end() const { return offsets_[count_]; }  // number of rows that belong to a group

 private:
  const int32_t* offsets_;
  int64_t count_;
};

// Returns rows [begin, end), for codes at block boundaries.
Value slice(const Value& value, int64_t begin, int64_t end);

// Returns `value` in high precision: dequantized, which is exact, or converted. extreme as in Dequantize.
Tensor high_precision(const Value& value, Dtype dtype, const Tensor& extreme = {});

}  // namespace mantissa
