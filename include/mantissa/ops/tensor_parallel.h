// The tensor-parallel context of an operation: its position among the ranks that share its weight, in Megatron's tensor parallelism
// (Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022). An operation makes at most one exchange forward and one
// backward for each weight, except cross_entropy, whose chunks each have one.
#pragma once

#include "mantissa/comm/mesh.h"

namespace mantissa {

struct TensorParallel {
  Communicator group{};       // the ranks that share the weight; a group of one changes nothing and costs nothing
  Split split = Split::none;  // none: the operation is local
  // > 0: sequence parallelism. Activations outside split operations hold this rank's share of so many rows, share_of(tokens, rank, size).
  // Else they are whole and the same on all ranks.
  int64_t tokens = 0;
};
// Returns the context on a mesh; tokens: of all its tensor ranks.
TensorParallel tensor_parallel(const Mesh& mesh, Split split, int64_t tokens);

struct RowRange {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
// Returns a contiguous, nearly equal, possibly empty range: begin = rows * rank / ranks. The last rank has the last row.
RowRange share_of(int64_t rows, int rank, int ranks);

}  // namespace mantissa
