// Tables of text, and that of `mantissa explain`: what each module of a plan computes, stores, sends and exports.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "mantissa/backend/gemm_path.h"
#include "mantissa/config/run_config.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

// Returns lines of cells in columns. To the right stand the last column or, of a table of numbers, all but the first.
enum class Columns { text, numbers };
std::string aligned(const std::vector<std::vector<std::string>>& rows, Columns columns = Columns::text);

std::string rounded(double value, int digits);  // so many behind the point

constexpr size_t kNarrowColumns = 100;
enum class PlanTable { narrow, wide };  // at most kNarrowColumns, long names without their middle; or all columns as wide as they are

// Returns one line per module, equal layers taken together; where ranks share weights the narrow table has the shape as "[128/8, 1536/4,
// 2048]" (128 experts over 8 ranks, 1536 rows over 4), the wide one also what a rank holds.
std::string plan_table(const PrecisionPlan& plan, PlanTable form, const ModelRanks& ranks = {});
// Returns what the wide table has and the narrow one leaves out: "recipe mxfp8 | fprop e4m3 1x32 * e4m3 32x32 | dgrad ... | wgrad ...", a
// line for each recipe that quantizes or simulates operands of a GEMM; none if no recipe does. Where GEMMs of one recipe have other
// operands in some modules, another line names the first of these: "recipe mxfp8 of output | ...".
std::vector<std::string> recipe_lines(const PrecisionPlan& plan);

// The table of `mantissa explain --device`: how each GEMM of a step is multiplied on a device (backend/gemm_path.h).

// Returns the form of a GEMM with the operands that the recipe chooses, of a weight of which a rank holds `held`, for so many rows of
// tokens. Rows of wgrad are rounded up to whole blocks, as its operator does.
GemmForm gemm_form(const Recipe& recipe, GemmRole role, const ModuleShape& held, int64_t rows);

struct PlannedGemm {
  std::string module, operands;
  GemmRole role;
  GemmForm form;  // for experts that of one of them, with its share of the tokens
  GemmRoute route;
};
// Returns all GEMMs of one micro batch, in the order of the model.
std::vector<PlannedGemm> planned_gemms(const RunConfig& config, const PrecisionPlan& plan, const GemmDevice& device);

// "sm_90 with cuBLASLt 13.1", or "cpu".
std::string gemm_device_text(const GemmDevice& device);
// Takes equal layers together. The reasons why codes are not multiplied as codes stand below, in the order of their numbers. A narrow table
// has no operands, which the table of the plan has.
std::string gemm_table(const std::vector<PlannedGemm>& gemms, const GemmDevice& device, PlanTable form);

}  // namespace mantissa
