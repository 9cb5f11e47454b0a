#include "ops/exchange.h"

namespace mantissa {
namespace {

RowRange own_rows(const Place& place) { return share_of(place.tokens, place.group.rank(), place.group.size()); }

// By rank, of rows of `size` each.
std::vector<int64_t> row_counts(const Place& place, int64_t size) {
  std::vector<int64_t> out;
  for (int r = 0; r < place.group.size(); ++r) out.push_back(size * share_of(place.tokens, r, place.group.size()).size());
  return out;
}

int64_t row_bytes(const Tensor& tensor) { return tensor.shape().with_dim0(1).elements() * dtype_bytes(tensor.dtype()); }

}  // namespace

void require_own_rows(const char* op, const Place& place, const Tensor& x) {
  const RowRange own = own_rows(place);
  require(!by_tokens(place) || x.dim(0) == own.size(), op, ": ", x.dim(0), " rows, but rank ", place.group.rank(), " of ",
          place.group.size(), " has ", own.size(), " of ", place.tokens, " tokens");
}

Tensor gathered_rows(const Place& place, const Tensor& share) {
  if (!by_tokens(place)) return share;
  const RowRange own = own_rows(place);
  Tensor out = empty(share.device(), share.dtype(), share.shape().with_dim0(place.tokens));
  share.device().run(Convert{.x = share, .out = out.slice(own.begin, own.end)});
  place.group.all_gather(host_memory(out), row_counts(place, row_bytes(out)), Purpose::activations);
  return out;
}

Tensor share_of_rows(const Place& place, const Tensor& rows) {
  if (!by_tokens(place)) return rows;
  require(rows.dim(0) == place.tokens, "a share of ", rows.dim(0), " rows of ", place.tokens, " tokens");
  const RowRange own = own_rows(place);
  Tensor out = empty(rows.device(), rows.dtype(), rows.shape().with_dim0(own.size()));
  rows.device().run(Convert{.x = rows.slice(own.begin, own.end), .out = out});
  return out;
}

void gather_rows(const Place& place, const QuantizedTensor& codes) {
  const QuantizedTensor rows = slice(codes, 0, place.tokens);
  const auto code_counts = row_counts(place, row_bytes(rows.codes)), scale_counts = row_counts(place, row_bytes(rows.scales));
  const Communicator::Gather parts[] = {{.bytes = host_memory(rows.codes), .counts = code_counts},
                                        {.bytes = host_memory(rows.scales), .counts = scale_counts}};
  place.group.all_gather(parts, Purpose::activations);
}

Tensor gathered_columns(const Place& place, const Tensor& columns) {
  if (!shared(place)) return columns;
  const int64_t rows = columns.dim(0), ranks = place.group.size(), rank = place.group.rank();
  Backend& device = columns.device();
  const Tensor by_rank = empty(device, columns.dtype(), {ranks * rows, columns.dim(1)});
  device.run(Convert{.x = columns, .out = by_rank.slice(rank * rows, (rank + 1) * rows)});
  const std::vector<int64_t> counts(static_cast<size_t>(ranks), columns.bytes());
  place.group.all_gather(host_memory(by_rank), counts, Purpose::activations);
  if (rows == 1) return by_rank.view({1, ranks * columns.dim(1)});
  // A lookup is what puts rows into another order: the parts of a row behind each other.
  std::vector<int32_t> order;
  for (int64_t i = 0; i < rows * ranks; ++i) order.push_back(static_cast<int32_t>(i % ranks * rows + i / ranks));
  const Tensor out = empty_like(by_rank), ids = from_host(device, Dtype::i32, {rows * ranks}, order.data());
  device.run(EmbeddingForward{.ids = ids, .weight = by_rank, .out = out});
  return out.view({rows, ranks * columns.dim(1)});
}

Tensor summed(const Place& place, const Tensor& partial, const Tensor& bias, Dtype dtype) {
  Tensor sum = partial;
  if (by_tokens(place)) {
    const RowRange own = own_rows(place);
    place.group.sum_scatter(partial.view({partial.elements()}), row_counts(place, partial.dim(1)), Purpose::activations);
    sum = partial.slice(own.begin, own.end);
  } else {
    place.group.sum(partial, Purpose::activations);
  }
  if (bias.defined() && bias.dtype() != dtype) {  // of another compute type: added before the only rounding, as a product does
    const Tensor wide = empty_like(sum);
    wide.device().run(AddBias{.x = sum, .bias = converted(bias, sum.dtype()), .out = wide});
    return converted(wide, dtype);
  }
  const bool done = sum.dtype() == dtype && !by_tokens(place);  // a share is copied, or all of partial would live as long
  const Tensor out = done ? sum : empty(sum.device(), dtype, sum.shape());
  if (bias.defined()) {
    out.device().run(AddBias{.x = sum, .bias = bias, .out = out});
  } else if (!done) {
    out.device().run(Convert{.x = sum, .out = out});
  }
  return out;
}

}  // namespace mantissa
