#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"

namespace mantissa {

Var embedding(const Tensor& ids, const Var& weight) {
  const Tensor& table = weight.value();
  Tensor out = empty(table.device(), table.dtype(), {ids.elements(), table.dim(1)});
  table.device().run(EmbeddingForward{.ids = ids, .weight = table, .out = out});
  if (!recording({weight})) return Var(out);
  return record("embedding", out, {weight}, [ids, leaf = &weight.trained_leaf("embedding")](const Tensor& dy) {
    const auto [dweight, accumulate] = leaf->target();
    dy.device().run(EmbeddingBackward{.ids = ids, .dy = dy, .dweight = dweight, .accumulate = accumulate});
    return std::vector<Tensor>(1);
  });
}

}  // namespace mantissa
