// Says how the ranks that share a matrix [out, in] divide it: each has all of it, an equal share of its rows (column-parallel, as Megatron
// calls y = x W^T split by outputs) or an equal share of its columns (row-parallel).
#pragma once

#include <cstdint>

namespace mantissa {

enum class Split { none, column_parallel, row_parallel };

// Says which of these ranks this is; one of one has everything.
struct ShareOf {
  int rank = 0, ranks = 1;
};

}  // namespace mantissa
