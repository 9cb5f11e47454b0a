#include "ops/exchange.h"

namespace mantissa {

TensorParallel tensor_parallel(const Mesh& mesh, Split split, int64_t tokens) {
  return {.group = mesh.tensor, .split = split, .tokens = mesh.sequence_parallel ? tokens : 0};
}

RowRange share_of(int64_t rows, int rank, int ranks) { return {rows * rank / ranks, rows * (rank + 1) / ranks}; }

namespace {

RowRange own_rows(const TensorParallel& tp) { return share_of(tp.tokens, tp.group.rank(), tp.group.size()); }

// Returns the counts by rank, of rows of `size` each.
std::vector<int64_t> row_counts(const TensorParallel& tp, int64_t size) {
  std::vector<int64_t> out;
  for (int r = 0; r < tp.group.size(); ++r) out.push_back(size * share_of(tp.tokens, r, tp.group.size()).size());
  return out;
}

int64_t row_bytes(const Tensor& tensor) { return tensor.shape().with_dim0(1).elements() * dtype_bytes(tensor.dtype()); }

}  // namespace

void require_own_rows(const char* op, const TensorParallel& tp, const Tensor& x) {
  const RowRange own = own_rows(tp);
  require(!by_tokens(tp) || x.dim(0) == own.size(), op, ": ", x.dim(0), " rows, but rank ", tp.group.rank(), " of ", tp.group.size(),
          " has ", own.size(), " of ", tp.tokens, " tokens");
}

Tensor gathered_rows(const TensorParallel& tp, const Tensor& share) {
  if (!by_tokens(tp)) return share;
  const RowRange own = own_rows(tp);
  Tensor out = empty(share.device(), share.dtype(), share.shape().with_dim0(tp.tokens));
  share.device().run(Convert{.x = share, .out = out.slice(own.begin, own.end)});
  tp.group.all_gather(out, row_counts(tp, row_bytes(out)), Purpose::activations);
  return out;
}

Tensor share_of_rows(const TensorParallel& tp, const Tensor& rows) {
  if (!by_tokens(tp)) return rows;
  require(rows.dim(0) == tp.tokens, "a share of ", rows.dim(0), " rows of ", tp.tokens, " tokens");
  const RowRange own = own_rows(tp);
  Tensor out = empty(rows.device(), rows.dtype(), rows.shape().with_dim0(own.size()));
  rows.device().run(Convert{.x = rows.slice(own.begin, own.end), .out = out});
  return out;
}

void gather_rows(const TensorParallel& tp, const QuantizedTensor& codes) {
  const QuantizedTensor rows = slice(codes, 0, tp.tokens);
  const auto code_counts = row_counts(tp, row_bytes(rows.codes)), scale_counts = row_counts(tp, row_bytes(rows.scales));
  const Communicator::Gather parts[] = {{.bytes = rows.codes, .counts = code_counts}, {.bytes = rows.scales, .counts = scale_counts}};
  tp.group.all_gather(parts, Purpose::activations);
}

void gather_parts(const TensorParallel& tp, const Tensor& all, int64_t bytes) {
  const std::vector<int64_t> counts(static_cast<size_t>(tp.group.size()), bytes);
  tp.group.all_gather(all, counts, Purpose::activations);
}

Tensor gathered_columns(const TensorParallel& tp, const Tensor& columns) {
  if (!shared(tp)) return columns;
  const int64_t rows = columns.dim(0), ranks = tp.group.size(), rank = tp.group.rank();
  Backend& device = columns.device();
  const Tensor by_rank = empty(device, columns.dtype(), {ranks * rows, columns.dim(1)});
  device.run(Convert{.x = columns, .out = by_rank.slice(rank * rows, (rank + 1) * rows)});
  gather_parts(tp, by_rank, columns.bytes());
  if (rows == 1) return by_rank.view({1, ranks * columns.dim(1)});
  // Reorders rows by a lookup, so that the parts of a row are adjacent.
  std::vector<int32_t> order;
  for (int64_t i = 0; i < rows * ranks; ++i) order.push_back(static_cast<int32_t>(i % ranks * rows + i / ranks));
  const Tensor out = empty_like(by_rank), ids = from_host(device, Dtype::i32, {rows * ranks}, order.data());
  device.run(EmbeddingForward{.ids = ids, .weight = by_rank, .out = out});
  return out.view({rows, ranks * columns.dim(1)});
}

Tensor summed(const TensorParallel& tp, const Tensor& partial, const Tensor& bias, Dtype dtype) {
  Tensor sum = partial;
  if (by_tokens(tp)) {
    const RowRange own = own_rows(tp);
    tp.group.sum_scatter(partial.view({partial.elements()}), row_counts(tp, partial.dim(1)), Purpose::activations);
    sum = partial.slice(own.begin, own.end);
  } else {
    tp.group.sum(partial, Purpose::activations);
  }
  if (bias.defined() && bias.dtype() != dtype) {  // the bias has another compute type: added before the only rounding, as a GEMM does
    const Tensor wide = empty_like(sum);
    wide.device().run(AddBias{.x = sum, .bias = converted(bias, sum.dtype()), .out = wide});
    return converted(wide, dtype);
  }
  const bool done = sum.dtype() == dtype && !by_tokens(tp);  // a share is copied, or all of partial would live as long
  const Tensor out = done ? sum : empty(sum.device(), dtype, sum.shape());
  if (bias.defined()) {
    out.device().run(AddBias{.x = sum, .bias = bias, .out = out});
  } else if (!done) {
    out.device().run(Convert{.x = sum, .out = out});
  }
  return out;
}

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
