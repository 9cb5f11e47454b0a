#include "backend/index_rule.h"

namespace mantissa {

void IndexRule::refuse(int64_t index, int64_t value) const {
  if (negative) fail(code, kernel, ": ", operand, '[', index, "] is ", value, ", not below the vocabulary size ", limit);
  fail(code, kernel, ": ", operand, '[', index, "] is ", value, ", not in [0, ", limit, ')');
}

}  // namespace mantissa
