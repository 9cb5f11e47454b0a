// Checks index tensors by value, which only a backend whose memory the host can read may do. A kernel calls them before its first write.
#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa {

// Requires every element of i32 `indices` in [0, limit). Throws Error(code) with the position and the value of the first that is not.
void check_indices(ExitCode code, const char* kernel, const char* operand, const Tensor& indices, int64_t limit);

// Also allows -1, which stands for none. Throws Error(internal).
void check_optional_indices(const char* kernel, const char* operand, const Tensor& indices, int64_t limit);

// Also allows negative elements, which are ignored targets.
void check_targets(const char* kernel, const Tensor& targets, int64_t vocab);

// Requires 0 <= start <= i for position i of every sequence of `length`. Checks nothing if undefined. Throws Error(internal).
void check_segment_starts(const char* kernel, const Tensor& segment_starts, int64_t length);

}  // namespace mantissa
