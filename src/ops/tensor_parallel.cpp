#include "mantissa/ops/tensor_parallel.h"

namespace mantissa {

TensorParallel tensor_parallel(const Mesh& mesh, Split split, int64_t tokens) {
  return {.group = mesh.tensor, .split = split, .tokens = mesh.sequence_parallel ? tokens : 0};
}

RowRange share_of(int64_t rows, int rank, int ranks) { return {rows * rank / ranks, rows * (rank + 1) / ranks}; }

}  // namespace mantissa
