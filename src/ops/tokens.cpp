#include "mantissa/ops/ops.h"
#include "ops/exchange.h"

namespace mantissa {

Var gathered_tokens(const Var& x, const Place& place) {
  if (!by_tokens(place)) return x;
  require_own_rows("gathered_tokens", place, x.value());
  return record("gathered_tokens", gathered_rows(place, x.value()), {x},
                [place](const Tensor& dy) { return std::vector<Tensor>{share_of_rows(place, dy)}; });
}

Var own_tokens(const Var& x, const Place& place) {
  if (!by_tokens(place)) return x;
  return record("own_tokens", share_of_rows(place, x.value()), {x},
                [place](const Tensor& dy) { return std::vector<Tensor>{gathered_rows(place, dy)}; });
}

}  // namespace mantissa
