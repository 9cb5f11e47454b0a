// Dispatches rows of tokens to experts and combines them again, on one rank or among those that share the experts.
#pragma once

#include <vector>

#include "mantissa/backend/functions.h"
#include "ops/ops.h"

namespace mantissa {

// Plans the all-to-all of a dispatch: rows go to the ranks of their experts, ordered by expert, and are grouped there (Dispatch).
struct AllToAllPlan {
  Communicator group;
  Tensor rows, assignments;            // for this rank's tokens, by expert of all ranks, without padding (DispatchTable)
  std::vector<int64_t> sent, arrived;  // rows to and from each rank
  std::vector<int64_t> ends;           // ends of the rows of each rank to each expert here, with padding (NumberedRows)
};

// Dispatches tokens [N, C], values or rowwise codes: returns the rows of each expert [R, C], and with weights [N, K] fp32 also one number
// for each row, 0 in padding. Makes one exchange.
struct PermutedTokens {
  Value rows;
  Tensor weights{};
};
PermutedTokens to_experts(const Dispatch& to, const Value& tokens, const Tensor& weights = {});

// Combines: returns the sum over the assignments of each token [N, C], and numbers of the rows as those of the assignments [N, K]. Makes
// one exchange.
struct TokenRows {
  Tensor sums;
  Tensor weights{};
};
TokenRows to_tokens(const Dispatch& from, const Tensor& rows, const Tensor& weights = {});

}  // namespace mantissa
