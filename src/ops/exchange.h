// What ranks that share a weight send each other. Activations travel as Purpose::activations.
#pragma once

#include "mantissa/backend/functions.h"
#include "mantissa/ops/place.h"

namespace mantissa {

inline bool shared(const Place& place) { return place.split != Split::none && place.group.size() > 1; }
inline bool shared(const Place& place, Split split) { return place.split == split && place.group.size() > 1; }
inline bool by_tokens(const Place& place) { return shared(place) && place.tokens > 0; }  // sequence parallelism

// All rows [tokens, ...] of which each rank brings its share. Without sequence parallelism what it is given.
Tensor gathered_rows(const Place& place, const Tensor& share);
// The way back: a copy of this rank's rows of them, so that the others need not live as long.
Tensor share_of_rows(const Place& place, const Tensor& rows);
// gathered_rows() in place, of rowwise codes with at least `tokens` rows.
void gather_rows(const Place& place, const QuantizedTensor& codes);
// [N, C of each rank, by rank] where the ranks share columns.
Tensor gathered_columns(const Place& place, const Tensor& columns);

// The sum of partial [N, C] over the ranks, with sequence parallelism this rank's rows of it, plus bias [C] (optional), rounded once to
// dtype. `partial` is overwritten.
Tensor summed(const Place& place, const Tensor& partial, const Tensor& bias, Dtype dtype);

// Throws unless x, the input or output of `op` outside its product, has this rank's rows.
void require_own_rows(const char* op, const Place& place, const Tensor& x);

}  // namespace mantissa
