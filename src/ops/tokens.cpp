#include "mantissa/ops/ops.h"
#include "ops/exchange.h"

namespace mantissa {

Var gathered_tokens(const Var& x, const TensorParallel& tp) {
  if (!by_tokens(tp)) return x;
  require_own_rows("gathered_tokens", tp, x.value());
  return record("gathered_tokens", gathered_rows(tp, x.value()), {x},
                [tp](const Tensor& dy) { return std::vector<Tensor>{share_of_rows(tp, dy)}; });
}

Var own_tokens(const Var& x, const TensorParallel& tp) {
  if (!by_tokens(tp)) return x;
  return record("own_tokens", share_of_rows(tp, x.value()), {x},
                [tp](const Tensor& dy) { return std::vector<Tensor>{gathered_rows(tp, dy)}; });
}

}  // namespace mantissa
