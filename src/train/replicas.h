// Whether ranks still have the same weights where they should: memory and networks may change bits unnoticed.
#pragma once

#include "mantissa/optim/optimizer.h"

namespace mantissa {

// Compares what forward reads, values and codes, with what its owner in the data group has; and what tensor ranks hold alike, masters and
// moments, too, with what the first of them has; buffers with those of rank 0: a few small exchanges of hashes, a call of every
// rank, between steps. Throws Error(numerical) on all ranks that names rank and tensor.
void require_same_replicas(const Optimizer& optimizer, const ParameterSet& parameters);

}  // namespace mantissa
