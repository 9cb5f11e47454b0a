// Exchanges activations among ranks that share a weight, as Purpose::activations.
#pragma once

#include "mantissa/backend/functions.h"
#include "ops/ops.h"

namespace mantissa {

inline bool shared(const TensorParallel& tp) { return tp.split != Split::none && tp.group.size() > 1; }
inline bool shared(const TensorParallel& tp, Split split) { return tp.split == split && tp.group.size() > 1; }
inline bool by_tokens(const TensorParallel& tp) { return shared(tp) && tp.tokens > 0; }  // sequence parallelism

// Gathers all rows [tokens, ...], of which each rank brings its share. Without sequence parallelism it returns its argument.
Tensor gathered_rows(const TensorParallel& tp, const Tensor& share);
// Copies this rank's share of rows, so that the others can be freed.
Tensor share_of_rows(const TensorParallel& tp, const Tensor& rows);
// Gathers rowwise codes of at least `tokens` rows in place.
void gather_rows(const TensorParallel& tp, const QuantizedTensor& codes);
// Gathers `all` in place, of which each rank brings a part of so many bytes.
void gather_parts(const TensorParallel& tp, const Tensor& all, int64_t bytes);
// Gathers [N, C of each rank, by rank] where the ranks share columns.
Tensor gathered_columns(const TensorParallel& tp, const Tensor& columns);

// Sums partial [N, C] over the ranks, or with sequence parallelism this rank's rows of it, adds bias [C] (optional), and rounds once to
// dtype. Overwrites `partial`.
Tensor summed(const TensorParallel& tp, const Tensor& partial, const Tensor& bias, Dtype dtype);

// Throws unless x, an operand of `op` that is shared by tokens, has this rank's rows.
void require_own_rows(const char* op, const TensorParallel& tp, const Tensor& x);

}  // namespace mantissa
