#include "backend/cpu/indices.h"

#include "backend/index_rule.h"

namespace mantissa {
namespace {

void check(const Tensor& indices, const IndexRule& rule) {
  const int32_t* values = indices.device_data<int32_t>();
  for (int64_t i = 0; i < indices.elements(); ++i) rule.check(i, values[i]);
}

}  // namespace

void check_indices(ExitCode code, const char* kernel, const char* operand, const Tensor& indices, int64_t limit) {
  check(indices, IndexRule::below(code, kernel, operand, limit));
}

void check_targets(const char* kernel, const Tensor& targets, int64_t vocab) { check(targets, IndexRule::targets(kernel, vocab)); }

void check_optional_indices(const char* kernel, const char* operand, const Tensor& indices, int64_t limit) {
  check(indices, IndexRule::optional(kernel, operand, limit));
}

void check_segment_starts(const char* kernel, const Tensor& segment_starts, int64_t length) {
  if (!segment_starts.defined()) return;
  const IndexRule rule = IndexRule::each(kernel, "segment_starts");
  const int32_t* starts = segment_starts.device_data<int32_t>();
  for (int64_t i = 0; i < segment_starts.elements(); ++i) rule.within(0, i % length).check(i, starts[i]);
}

}  // namespace mantissa
