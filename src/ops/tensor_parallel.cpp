#include "mantissa/ops/tensor_parallel.h"

namespace mantissa {

RowRange share_of(int64_t rows, int rank, int ranks) { return {rows * rank / ranks, rows * (rank + 1) / ranks}; }

}  // namespace mantissa
