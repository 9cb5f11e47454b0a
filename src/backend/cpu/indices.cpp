#include "backend/cpu/indices.h"

namespace mantissa {

void check_indices(ExitCode code, const char* kernel, const char* operand, const Tensor& indices, int64_t limit) {
  const int32_t* values = indices.device_data<int32_t>();
  for (int64_t i = 0; i < indices.elements(); ++i) {
    if (values[i] < 0 || values[i] >= limit) fail(code, kernel, ": ", operand, '[', i, "] is ", values[i], ", not in [0, ", limit, ')');
  }
}

void check_optional_indices(const char* kernel, const char* operand, const Tensor& indices, int64_t limit) {
  const int32_t* values = indices.device_data<int32_t>();
  for (int64_t i = 0; i < indices.elements(); ++i) {
    require(values[i] >= -1 && values[i] < limit, kernel, ": ", operand, '[', i, "] is ", values[i], ", not in [-1, ", limit, ')');
  }
}

void check_targets(const char* kernel, const Tensor& targets, int64_t vocab) {
  const int32_t* values = targets.device_data<int32_t>();
  for (int64_t i = 0; i < targets.elements(); ++i) {
    if (values[i] >= vocab) {
      fail(ExitCode::data, kernel, ": targets[", i, "] is ", values[i], ", not below the vocabulary size ", vocab);
    }
  }
}

void check_segment_starts(const char* kernel, const Tensor& segment_starts, int64_t length) {
  if (!segment_starts.defined()) return;
  const int32_t* starts = segment_starts.device_data<int32_t>();
  for (int64_t i = 0; i < segment_starts.elements(); ++i) {
    require(starts[i] >= 0 && starts[i] <= i % length, kernel, ": segment_starts[", i, "] is ", starts[i], ", not in [0, ", i % length,
            ']');
  }
}

}  // namespace mantissa
