// GEMMs of a few rows, as generation makes them: each reads its weight once, as it is stored, and decodes codes on the way. Every element
// of the output is a sum of fp32 in an order that depends on the depth and the format of the weight only: not on the rows beside it, nor on
// threads or the instruction set. Products are of exact values, and subnormal ones may be flushed.
#pragma once

#include <span>

#include "mantissa/backend/backend.h"

namespace mantissa {

// out [M, N] = a [M, K] * transposed b [N, K] + bias [N], which may be undefined.
struct FewRowsGemm {
  Tensor a;  // fp32 or bf16
  Value b;   // fp32, bf16 or codes; see takes_few_rows()
  Tensor out;
  Tensor bias{};
};

// Returns whether weights of this format are read here: in high precision, and codes of E4M3 and E2M1 in blocks of 32 columns, or of a
// multiple.
bool takes_few_rows(const Value& b);

// Runs GEMMs whose weights have one shape and one format. Returns false, with their outputs half written, where codes need more care: for
// an extreme scale of a block that is not zero, for NaN, and beside values of 2^119 and more.
bool multiply_few_rows(std::span<const FewRowsGemm> gemms);

}  // namespace mantissa
