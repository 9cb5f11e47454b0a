#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"

namespace mantissa {

Var convert(const Var& x, Dtype dtype) {
  const Dtype before = x.value().dtype();
  if (before == dtype) return x;
  return record("convert", converted(x.value(), dtype), {x},
                [before](const Tensor& dy) { return std::vector<Tensor>{converted(dy, before)}; });
}

}  // namespace mantissa
