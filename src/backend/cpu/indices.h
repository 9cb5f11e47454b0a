// Checks of index tensors by value, which only a backend whose memory the host can read may do. A kernel calls them before its first write.
#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa {

// Every element of i32 `indices` is in [0, limit). Throws Error(code) with the position and the value of the first that is not.
void check_indices(ExitCode code, const char* kernel, const char* operand, const Tensor& indices, int64_t limit);

// The same, but -1 is allowed: there is none. Throws Error(internal).
void check_optional_indices(const char* kernel, const char* operand, const Tensor& indices, int64_t limit);

// The same, but negative elements are allowed: they are ignored targets.
void check_targets(const char* kernel, const Tensor& targets, int64_t vocab);

// Position i of every sequence of `length` has 0 <= start <= i. Nothing to check if undefined. Throws Error(internal).
void check_segment_starts(const char* kernel, const Tensor& segment_starts, int64_t length);

}  // namespace mantissa
