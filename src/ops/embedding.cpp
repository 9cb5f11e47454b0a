#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/exchange.h"

namespace mantissa {

Var embedding(const Tensor& ids, const Var& weight, const Place& place) {
  require(place.split != Split::columns, "embedding: a table is split by rows");
  require(!by_tokens(place) || ids.elements() == place.tokens, "embedding: ", ids.elements(), " ids of ", place.tokens, " tokens");
  const Tensor& table = weight.value();
  TableRows part;
  if (shared(place)) part = {.first = table.dim(0) * place.group.rank(), .rows = table.dim(0) * place.group.size()};
  Tensor out = empty(table.device(), table.dtype(), {ids.elements(), table.dim(1)});
  table.device().run(EmbeddingForward{.ids = ids, .weight = table, .out = out, .part = part});
  if (shared(place)) out = summed(place, out, {}, out.dtype());  // all ranks but one add zeros
  if (!recording({weight})) return Var(out);
  return record("embedding", out, {weight}, [ids, part, place, leaf = &weight.trained_leaf("embedding")](const Tensor& dy) {
    const Tensor rows = gathered_rows(place, dy);
    const auto [dweight, accumulate] = leaf->target();
    dy.device().run(EmbeddingBackward{.ids = ids, .dy = rows, .dweight = dweight, .accumulate = accumulate, .part = part});
    return std::vector<Tensor>(1);
  });
}

}  // namespace mantissa
