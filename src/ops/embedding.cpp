#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"
#include "ops/exchange.h"

namespace mantissa {
namespace {

void require_token_ids(const Tensor& ids, const TensorParallel& tp) {
  require(tp.split != Split::row_parallel, "embedding: a table is split by rows");
  require(!by_tokens(tp) || ids.elements() == tp.tokens, "embedding: ", ids.elements(), " ids of ", tp.tokens, " tokens");
}

TableRows table_rows(const Tensor& table, const TensorParallel& tp) {
  if (!shared(tp)) return {};
  return {.first = table.dim(0) * tp.group.rank(), .rows = table.dim(0) * tp.group.size()};
}

}  // namespace

Var embedding(const Tensor& ids, const Var& weight, const TensorParallel& tp) {
  require_token_ids(ids, tp);
  const Tensor& table = weight.value();
  const TableRows part = table_rows(table, tp);
  Tensor out = empty(table.device(), table.dtype(), {ids.elements(), table.dim(1)});
  table.device().run(EmbeddingForward{.ids = ids, .weight = table, .out = out, .part = part});
  if (shared(tp)) out = summed(tp, out, {}, out.dtype());  // all ranks but one add zeros
  if (!recording({weight})) return Var(out);
  return record("embedding", out, {weight}, [ids, part, tp, leaf = &weight.trained_leaf("embedding")](const Tensor& dy) {
    const Tensor rows = gathered_rows(tp, dy);
    const auto [dweight, accumulate] = leaf->target();
    dy.device().run(EmbeddingBackward{.ids = ids, .dy = rows, .dweight = dweight, .accumulate = accumulate, .part = part});
    return std::vector<Tensor>(1);
  });
}

}  // namespace mantissa
