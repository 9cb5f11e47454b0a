#include "backend/index_rule.h"

namespace mantissa {

void IndexRule::refuse(int64_t index, int64_t value) const {
  if (form == Form::total) fail(code, kernel, ": ", value, ' ', operand, " has ", first);
  const std::string said = text(kernel, ": ", operand, '[', index, "] is ", value, ", not ");
  if (form == Form::target) fail(code, said, "below the vocabulary size ", end);
  if (form == Form::below) fail(code, said, "in [", first, ", ", end, ')');
  if (first + 1 == end) fail(code, said, first);
  fail(code, said, "in [", first, ", ", end - 1, ']');
}

void check_indices(const Tensor& indices, const IndexRule& rule) {
  const int32_t* values = indices.device_data<int32_t>();
  for (int64_t i = 0; i < indices.elements(); ++i) rule.check(i, values[i]);
}

void check_segment_starts(const char* kernel, const Tensor& segment_starts, int64_t length) {
  if (!segment_starts.defined()) return;
  const IndexRule rule = IndexRule::each(kernel, "segment_starts");
  const int32_t* starts = segment_starts.device_data<int32_t>();
  for (int64_t i = 0; i < segment_starts.elements(); ++i) rule.within(0, i % length).check(i, starts[i]);
}

}  // namespace mantissa
