#include "backend/cpu/indices.h"

#include "backend/index_rule.h"

namespace mantissa {
namespace {

void check(const Tensor& indices, const IndexRule& rule) {
  const int32_t* values = indices.device_data<int32_t>();
  for (int64_t i = 0; i < indices.elements(); ++i) {
    if (!rule.allows(values[i])) rule.refuse(i, values[i]);
  }
}

}  // namespace

void check_indices(ExitCode code, const char* kernel, const char* operand, const Tensor& indices, int64_t limit) {
  check(indices, {.code = code, .kernel = kernel, .operand = operand, .limit = limit});
}

void check_targets(const char* kernel, const Tensor& targets, int64_t vocab) { check(targets, IndexRule::targets(kernel, vocab)); }

void check_optional_indices(const char* kernel, const char* operand, const Tensor& indices, int64_t limit) {
  const int32_t* values = indices.device_data<int32_t>();
  for (int64_t i = 0; i < indices.elements(); ++i) {
    require(values[i] >= -1 && values[i] < limit, kernel, ": ", operand, '[', i, "] is ", values[i], ", not in [-1, ", limit, ')');
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
