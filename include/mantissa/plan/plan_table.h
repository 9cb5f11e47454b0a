// The table of `mantissa explain`: what each module of a plan computes, stores, sends and exports.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "mantissa/precision/plan.h"

namespace mantissa {

constexpr size_t kNarrowColumns = 100;
enum class PlanTable { narrow, wide };  // at most kNarrowColumns, long names without their middle; or all columns as wide as they are

// Returns one line per module, equal layers taken together; where ranks share weights the narrow table has the shape as "[128/8, 1536/4,
// 2048]" (128 experts over 8 ranks, 1536 rows over 4), the wide one also what a rank holds.
std::string plan_table(const PrecisionPlan& plan, PlanTable form, const ModelRanks& ranks = {});
// Returns what the wide table has and the narrow one leaves out: "recipe mxfp8 | fprop e4m3 1x32 * e4m3 32x32 | dgrad ... | wgrad ...", a
// line for each recipe that quantizes or simulates operands of a GEMM; none if no recipe does. Where GEMMs of one recipe have other
// operands in some modules, another line names the first of these: "recipe mxfp8 of output | ...".
std::vector<std::string> recipe_lines(const PrecisionPlan& plan);

}  // namespace mantissa
