// Whether the ranks of a data group still have the same weights: memory and networks may change bits unnoticed.
#pragma once

#include "mantissa/nn/shards.h"

namespace mantissa {

// Compares what forward reads, values and codes, with what its owner in the data group has, and what tensor ranks hold alike with what the
// first of them has, in two small exchanges of hashes; a call of every rank, between steps. Throws Error(numerical) on all ranks that names
// rank and tensor.
void require_same_replicas(const Shards& shards);

}  // namespace mantissa
