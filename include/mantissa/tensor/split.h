// How a matrix [out, in] is divided among the ranks that share it: whole on each; or each has rows of it (column-parallel in Megatron's
// words) or columns (row-parallel), as many as every other.
#pragma once

#include <cstdint>

namespace mantissa {

enum class Split { none, rows, columns };

// Which of them this is; one of one has everything.
struct ShareOf {
  int rank = 0, ranks = 1;
};

}  // namespace mantissa
