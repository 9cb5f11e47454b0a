#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "base/hash.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"
#include "mantissa/precision/plan.h"

namespace mantissa {
namespace {

const char* kind_name(ModuleKind kind) {
  switch (kind) {
    case ModuleKind::embedding: return "embedding";
    case ModuleKind::norm: return "norm";
    case ModuleKind::linear: return "linear";
    case ModuleKind::router: return "router";
    case ModuleKind::output: return "output";
    case ModuleKind::sinks: return "sinks";
  }
  return "unknown";
}

Json to_json(const Quantization& how) {
  if (!how) return nullptr;
  Json out = {{"format", format_name(how.format)}, {"block", {how.block_rows, how.block_cols}}, {"rule", scale_rule_name(how.rule)}};
  if (how.format == Format::nvfp4) out.add("tensor_exponent", int64_t{how.tensor_exponent});
  if (how.range != ScaleRange{}) out.add("scale_range", {how.range.least - 127, how.range.most - 127});
  return out;
}

Json to_json(const Simulation& how) {
  if (!how) return nullptr;
  Json out = {{"format", element_text(how.element)},
              {"block", {how.block_rows, how.block_cols}},
              {"scale", simulated_scale_name(how.scale)},
              {"rounding", rounding_name(how.rounding)}};
  if (how.scale == SimulatedScale::e8m0) out.add("rule", scale_rule_name(how.rule));
  return out;
}

Json to_json(const SimulatedOperands& simulated) {
  Json::Entries transformed;
  for (const GemmRole role : kGemmRoles) {
    if (simulated.hadamard_gemms.holds(role)) transformed.push_back(gemm_name(role));
  }
  return {{"weight", to_json(simulated.weight)},
          {"input", to_json(simulated.input)},
          {"output_grad", to_json(simulated.output_grad)},
          {"hadamard", simulated.hadamard},
          {"hadamard_gemms", transformed}};
}

Json to_json(const ModulePrecision& entry) {
  const ModuleShape& module = entry.module;
  const Recipe& recipe = entry.recipe;
  Json gemms;
  for (const GemmRole role : kGemmRoles) {
    if (has_gemm(module.kind) || (module.projects && recipe.quantizes())) gemms[gemm_name(role)] = gemm_text(recipe, role);
  }
  Json::Entries parts;
  for (const ModulePart& part : module.parts) parts.push_back(Json{{"name", part.name}, {"out", part.out}});
  const Json shape = module.in == 0        ? Json{module.out}
                     : module.matrices > 1 ? Json{module.matrices, module.out, module.in}
                                           : Json{module.out, module.in};
  Json out = {{"module", module.path},
              {"kind", kind_name(module.kind)},
              {"shape", shape},
              {"parts", parts},
              {"bias", module.bias},
              {"rule", entry.rule.empty() ? Json() : Json(entry.rule)},
              {"match", entry.match.empty() ? Json() : Json(entry.match)},
              {"recipe", recipe.name},
              {"compute", dtype_name(recipe.compute)},
              {"weight", to_json(recipe.weight)},
              {"input", to_json(recipe.input)},
              {"output_grad", to_json(recipe.output_grad)},
              {"weight_fake_quant", to_json(recipe.weight_fake_quant)},
              {"gemms", gemms},
              {"storage", stored_type_name(entry.storage)},
              {"wire", stored_type_name(entry.wire)},
              {"export", stored_type_name(entry.exported)},
              {"bytes", entry.bytes}};
  // Keys that most recipes leave at their default.
  if (recipe.columns != ColumnSource::rows) out.add("columns", choice_name(recipe.columns));
  if (recipe.backward != BackwardOperands::quantized) out.add("backward", choice_name(recipe.backward));
  if (recipe.simulated.any()) out.add("simulate", to_json(recipe.simulated));
  return out;
}

// Warns of weights whose forward and backward passes multiply by different numbers.
void warn_of_rows(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  const int64_t count = std::ranges::count_if(modules, [](const ModulePrecision& entry) {
    return choose_operands(entry.recipe, GemmRole::dgrad).second.source == OperandSource::requantized;
  });
  if (count == 0) return;
  warnings.push_back(text(count,
                          " weights are quantized in rows of blocks, not tiles, so dgrad multiplies by codes requantized along columns, "
                          "not by those of fprop"));
}

void warn_of_gather(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  int64_t linears = 0, high = 0;
  for (const ModulePrecision& entry : modules) {
    if (entry.module.kind != ModuleKind::linear) continue;
    ++linears;
    high += entry.stores_only_codes() ? 0 : 1;
  }
  if (high < linears && high > 0) {
    warnings.push_back(text("precision.fp8_param_gather: ", high, " of ", linears,
                            " linears have no quantized weight and are gathered in high precision"));
  }
}

// Warns of operands that a recipe quantizes and no GEMM reads, and of listed GEMMs that read nothing quantized.
void warn_of_idle_parts(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  std::set<std::string> seen;
  for (const ModulePrecision& entry : modules) {
    const Recipe& recipe = entry.recipe;
    if (entry.module.kind == ModuleKind::output || !seen.insert(recipe.name).second) continue;
    const auto unread = [&](const char* operand, const Quantization& how, const Simulation& simulated, bool read) {
      if ((!how && !simulated) || read) return;
      warnings.push_back(
          text("recipe \"", recipe.name, "\" ", how ? "quantizes " : "simulates ", operand, ", which none of its gemms reads"));
    };
    unread("weight", recipe.weight, recipe.simulated.weight, recipe.gemms.fprop || recipe.gemms.dgrad);
    unread("input", recipe.input, recipe.simulated.input, recipe.gemms.fprop || recipe.gemms.wgrad);
    unread("output_grad", recipe.output_grad, recipe.simulated.output_grad, recipe.gemms.dgrad || recipe.gemms.wgrad);
    const auto quantized = [](const OperandChoice& operand) { return operand.is_codes() || operand.source == OperandSource::simulated; };
    for (const GemmRole role : kGemmRoles) {
      const auto [first, second] = choose_operands(recipe, role);
      if (recipe.gemms.holds(role) && !quantized(first) && !quantized(second))
        warnings.push_back(text("recipe \"", recipe.name, "\" lists ", gemm_name(role), ", which has no quantized or simulated operand"));
    }
  }
}

// Servers fuse all expert weights of a layer, which therefore need one scheme.
void warn_of_split_experts(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  const ModulePrecision* first = nullptr;  // first of the two linears of a layer's experts
  for (const ModulePrecision& entry : modules) {
    if (!entry.module.experts) continue;
    const ModulePrecision* const up = std::exchange(first, entry.module.role == ModuleRole::mlp_output ? nullptr : &entry);
    if (!up || (up->recipe.weight == entry.recipe.weight && up->recipe.weight_fake_quant == entry.recipe.weight_fake_quant)) continue;
    warnings.push_back(text(up->module.path, " (", up->rule, ") and ", entry.module.path, " (", entry.rule,
                            ") have different weight formats, but servers fuse them: a packed export will refuse them"));
  }
}

// Warns of biases whose gradient sums codes; other biases sum their gradient before it is quantized.
void warn_of_bias_gradients(const std::vector<ModulePrecision>& modules, std::vector<std::string>& warnings) {
  std::vector<std::string> paths;
  for (const ModulePrecision& entry : modules) {
    const bool codes_move = LinearOperands(entry.recipe).takes_gradient_codes();
    const bool of_experts = entry.module.experts && entry.module.role == ModuleRole::mlp_output;
    if (of_experts && entry.module.bias > 0 && codes_move) paths.push_back(entry.module.path);
  }
  if (paths.empty()) return;
  warnings.push_back(
      text("model.moe.expert_mlp_bias: the gradient of the bias of ", joined_path(paths),
           " is a sum of codes of the output gradient, which is dispatched as codes: it differs from a sum of values by 2 to 4 %"));
}

}  // namespace

std::optional<std::string> PrecisionPlan::gather_advice() const {
  int64_t copies = 0, saved = 0;
  for (const ModulePrecision& entry : modules_) {
    if (entry.module.kind != ModuleKind::linear || entry.stores_only_codes() || !entry.recipe.reads_only_weight_codes()) continue;
    ++copies;
    if (entry.storage == StoredType::bf16) saved += 2 * entry.module.weight_elements();  // an fp32 weight is the master
  }
  if (saved == 0) return {};
  return text("precision.fp8_param_gather is off: ", copies,
              " quantized weights are held and gathered in high precision, too; with it on, weights need ", saved,
              " bytes less beside the masters");
}

std::optional<std::string> PrecisionPlan::cost_of_rows() const {
  int64_t count = 0, extra = 0, sent = 0;
  for (const ModulePrecision& entry : modules_) {
    const Quantization& weight = entry.recipe.weight;
    if (!entry.recipe.reads_weight_codes() || !weight.rowwise()) continue;
    const int64_t rows = entry.module.rows(), across = ceil_div(entry.module.in, weight.block());
    const int64_t more = (rows - ceil_div(rows, weight.block())) * across;
    ++count;
    extra += more;
    sent += entry.stores_only_codes() ? more : 0;
  }
  if (count == 0) return {};
  const std::string wire = sent == 0 ? "" : sent == extra ? " and on the wire" : text(", ", sent, " of them on the wire, too");
  return text(count, " weights in rows of blocks, not tiles: ", extra, " bytes more of scales in memory", wire);
}

Json PrecisionPlan::to_json() const {
  Json::Entries entries;
  for (const ModulePrecision& entry : modules_) entries.push_back(mantissa::to_json(entry));
  return {{"hash", Hash64{hash()}.text()},
          {"modules", entries},
          {"parameters", parameters()},
          {"active_parameters", active_parameters()},
          {"bytes", bytes()}};
}

std::vector<std::string> PrecisionPlan::warnings() const {
  std::vector<std::string> warnings = idle_keys_;
  warn_of_rows(modules_, warnings);
  warn_of_gather(modules_, warnings);
  warn_of_idle_parts(modules_, warnings);
  warn_of_split_experts(modules_, warnings);
  warn_of_bias_gradients(modules_, warnings);
  return warnings;
}

}  // namespace mantissa
