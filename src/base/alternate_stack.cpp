#include "mantissa/base/alternate_stack.h"

namespace mantissa {

AlternateStack::AlternateStack() {
  stack_t own{};
  own.ss_sp = memory_;
  own.ss_size = kBytes;
  ::sigaltstack(&own, &previous_);
}

AlternateStack::~AlternateStack() { ::sigaltstack(&previous_, nullptr); }

}  // namespace mantissa
