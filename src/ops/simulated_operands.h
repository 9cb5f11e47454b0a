// Divides a simulated operand into the matrices that are rounded each on its own, and numbers its elements for random rounding.
#pragma once

#include <vector>

#include "mantissa/ops/ops.h"
#include "mantissa/ops/quantization_observer.h"
#include "mantissa/ops/rounding_scope.h"
#include "mantissa/precision/recipe.h"

namespace mantissa {

// Returns where the matrices end that an operand [rows, C] consists of, beginning with 0: one without groups; else the weights of the
// experts, or what an expert has of the tokens of one rank.
std::vector<int64_t> simulated_ends(const Dispatch& groups, OperandRole role, int64_t rows);

// Says which bits an operand of this shape draws. Weights are numbered anew in each step, and rows of tokens, or of their assignments to
// experts, through the whole run.
RoundingDraws draws_of(const WeightPlace& weight, const Dispatch& groups, GemmRole gemm, OperandRole role, const Shape& shape,
                       const RoundingPosition& at);
RoundingDraws slice(const RoundingDraws& all, int64_t begin, int64_t end);  // draws of these rows

}  // namespace mantissa
