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

}  // namespace mantissa
