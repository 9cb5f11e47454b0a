// Rows of tokens on their way to experts and back, on one rank or among those that share the experts.
#pragma once

#include <vector>

#include "mantissa/backend/functions.h"
#include "mantissa/ops/ops.h"

namespace mantissa {

// How rows travel between ranks: first to the ranks of their experts, behind each other by expert, and there into groups (Dispatch).
struct ExpertJourney {
  Communicator group;
  Tensor rows, choices;                // of this rank's tokens, by expert of all ranks, without padding (DispatchTable)
  std::vector<int64_t> sent, arrived;  // rows to and from each rank
};

// Where a dispatch of these choices leads.
Dispatch dispatch_among(const ExpertRanks& ranks, const Tensor& experts, int64_t num_experts, int64_t multiple, int64_t capacity);

// Of tokens [N, C], values or rowwise codes: the rows of each expert [R, C], and with weights [N, K] fp32 also one number for each row; 0
// in rows of padding. One exchange.
struct ExpertRows {
  Value rows;
  Tensor weights{};
};
ExpertRows to_experts(const Dispatch& to, const Value& tokens, const Tensor& weights = {});

// The way back: the sum over the choices of each token [N, C], and of numbers for each row those of the choices [N, K]. One exchange.
struct TokenRows {
  Tensor sums;
  Tensor weights{};
};
TokenRows to_tokens(const Dispatch& from, const Tensor& rows, const Tensor& weights = {});

}  // namespace mantissa
