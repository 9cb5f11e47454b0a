// Demands of recipes with simulated operands on their other members and on a weight.
#pragma once

#include <string>
#include <vector>

#include "mantissa/precision/operands.h"

namespace mantissa {

void check_simulated(const Recipe& recipe, std::vector<RecipeProblem>& problems);

// Lengths of which the rows and the columns of a weight must be multiples, so that no block of any operand is cut by a part or a rank.
struct SimulatedLengths {
  std::vector<int64_t> out, in;
};
SimulatedLengths simulated_lengths(const Recipe& recipe);

// Returns the part of a plan's hash that a recipe with simulated operands adds; "" for other recipes.
std::string simulated_text(const Recipe& recipe);

}  // namespace mantissa
