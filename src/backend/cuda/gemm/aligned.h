// Operands that begin at multiples of 16 bytes. Kernels and libraries read rows by 16 bytes and choose by alignment how they multiply; an
// operand that begins elsewhere is copied first, so that a result has the same bits wherever its operands lie.
#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa::gpu {

enum class Contents { read, overwritten };
// Returns the tensor if it begins at a multiple of 16 bytes, else a new one that does, with the same values if they are read.
Tensor aligned(Backend& device, const Tensor& x, Contents contents);
// Like aligned() above, but for an operand that is read; codes stay where they are.
Value aligned(Backend& device, const Value& x);
// Copies back to a tensor that aligned() has replaced by another one; else does nothing.
void copy_back(Backend& device, const Tensor& from, const Tensor& to);

}  // namespace mantissa::gpu
