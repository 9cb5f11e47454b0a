// What recipes with simulated operands ask of their other members and of a weight.
#pragma once

#include <string>
#include <vector>

#include "mantissa/precision/operands.h"

namespace mantissa {

void check_simulated(const Recipe& recipe, std::vector<RecipeProblem>& problems);

// What the rows and the columns of a weight must be multiples of, so that no block of any operand is cut by a part or a rank.
struct SimulatedLengths {
  std::vector<int64_t> out, in;
};
SimulatedLengths simulated_lengths(const Recipe& recipe);

// What a hash of the plan has of a recipe with simulated operands: "" of others.
std::string simulated_text(const Recipe& recipe);

}  // namespace mantissa
