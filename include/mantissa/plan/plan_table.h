// The table of `mantissa explain`: what each module of a plan computes, stores, sends and exports.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "mantissa/precision/plan.h"

namespace mantissa {

constexpr size_t kNarrowColumns = 100;
enum class PlanTable { narrow, wide };  // at most kNarrowColumns, long names without their middle; or all columns as wide as they are

// Text with one line per module, equal layers taken together; where ranks share weights the narrow table has the shape as
// "[128/8, 1536/4, 2048]" (128 experts over 8 ranks, 1536 rows over 4), the wide one also what a rank holds.
std::string plan_table(const PrecisionPlan& plan, PlanTable form, const ModelRanks& ranks = {});
// What the narrow table leaves out: the operands of the GEMMs of each recipe that quantizes or simulates some. Where modules of one recipe
// differ, a line for each, from the second on with the path of the first such module.
std::vector<std::string> recipe_lines(const PrecisionPlan& plan);

}  // namespace mantissa
