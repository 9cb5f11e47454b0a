// The table of `mantissa explain --device`: how each GEMM of a step is multiplied on a device (backend/gemm_path.h).
#pragma once

#include <string>
#include <vector>

#include "mantissa/backend/gemm_path.h"
#include "mantissa/config/run_config.h"
#include "mantissa/plan/plan_table.h"

namespace mantissa {

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
