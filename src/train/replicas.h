// Checks that ranks still have the same weights where they should: memory and networks may change bits unnoticed.
#pragma once

#include "mantissa/optim/optimizer.h"

namespace mantissa {

// Compares values and codes that forward reads with those of their owner in the data group; tensors that tensor ranks hold alike, masters
// and moments, too, with those of the first; and buffers with those of rank 0. All ranks make this call between steps; it takes a few small
// exchanges of hashes. Throws Error(numerical) on all ranks that names rank and tensor.
void require_same_replicas(const Optimizer& optimizer, const ParameterSet& parameters);

}  // namespace mantissa
