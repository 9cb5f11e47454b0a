// Where an operation stands among the ranks that share its weight: Megatron's tensor parallelism (Shoeybi et al. 2019), and its sequence
// parallelism (Korthikanti et al. 2022). An operation makes at most one exchange forward and one backward for each weight, but for
// cross_entropy, whose chunks each have one.
#pragma once

#include "mantissa/comm/communicator.h"
#include "mantissa/tensor/split.h"

namespace mantissa {

struct Place {
  Communicator group{};       // the ranks that share the weight; a group of one changes nothing and costs nothing
  Split split = Split::none;  // none: the operation is local
  // > 0: sequence parallelism. Activations outside split operations hold this rank's share of so many rows, share_of(tokens, rank, size).
  // Without it they are whole, the same on all ranks.
  int64_t tokens = 0;
};

struct RowRange {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
// Contiguous, nearly equal, possibly empty: begin = rows * rank / ranks. The last rank has the last row.
RowRange share_of(int64_t rows, int rank, int ranks);

}  // namespace mantissa
