#include "mantissa/precision/config.h"

#include <algorithm>
#include <tuple>

#include "mantissa/base/text.h"
#include "mantissa/formats/nvfp4.h"

namespace mantissa {
namespace {

QuantizationConfig quantization(Format format, int64_t rows, int64_t columns, ScaleRule rule = ScaleRule::rceil) {
  return {.format = format, .block = {rows, columns}, .rule = rule};
}

// The scales of NVFP4 tensors: weights up to 10.5, in blocks whose largest may be as small as 2^-11.4 before its scale loses digits, and
// inputs up to 672, with 2^-5.4.
constexpr int64_t kWeightExponent = -8, kInputExponent = -2;

QuantizationConfig nvfp4(int64_t exponent) {
  return {.format = Format::nvfp4, .block = {1, kNvfp4Block}, .rule = ScaleRule::nearest, .tensor_exponent = exponent};
}

// Lists the presets in the order of the documentation.
const std::vector<std::pair<std::string, RecipeConfig>>& presets() {
  static const auto table = [] {
    const QuantizationConfig row = quantization(Format::e4m3, 1, 32), tile = quantization(Format::e4m3, 32, 32);
    const QuantizationConfig row128 = quantization(Format::e4m3, 1, 128), tile128 = quantization(Format::e4m3, 128, 128);
    const QuantizationConfig mxfp4 = quantization(Format::e2m1, 1, 32, ScaleRule::flashinfer);
    const std::vector<GemmRole> all = {GemmRole::fprop, GemmRole::dgrad, GemmRole::wgrad};
    RecipeConfig high, bf16, fp32, mxfp8, mxfp8_te, mxfp8_weights, fp8_block, mxfp4_qat, mxfp4_qat_mxfp8_act, mxfp4_qat_mxfp4_act;
    RecipeConfig nvfp4_qat, nvfp4_qat_nvfp4_act;
    bf16.compute = Dtype::bf16;
    fp32.compute = Dtype::f32;
    mxfp8.weight = tile, mxfp8.input = row, mxfp8.output_grad = row, mxfp8.gemms = all;
    mxfp8_te.weight = row, mxfp8_te.input = row, mxfp8_te.output_grad = quantization(Format::e5m2, 1, 32), mxfp8_te.gemms = all;
    mxfp8_te.columns = ColumnSource::values;
    mxfp8_weights.weight = tile, mxfp8_weights.gemms = {GemmRole::fprop, GemmRole::dgrad};
    fp8_block.weight = tile128, fp8_block.input = row128, fp8_block.output_grad = row128, fp8_block.gemms = all;
    mxfp4_qat.weight_fake_quant = mxfp4;
    mxfp4_qat_mxfp8_act.weight_fake_quant = mxfp4;
    mxfp4_qat_mxfp8_act.input = row, mxfp4_qat_mxfp8_act.output_grad = row, mxfp4_qat_mxfp8_act.gemms = all;
    mxfp4_qat_mxfp4_act.weight_fake_quant = mxfp4, mxfp4_qat_mxfp4_act.input = mxfp4, mxfp4_qat_mxfp4_act.gemms = {GemmRole::fprop};
    mxfp4_qat_mxfp4_act.backward = BackwardOperands::dequantized;  // the straight-through gradients of what fprop multiplied
    nvfp4_qat.weight_fake_quant = nvfp4(kWeightExponent);
    nvfp4_qat_nvfp4_act.weight_fake_quant = nvfp4(kWeightExponent), nvfp4_qat_nvfp4_act.input = nvfp4(kInputExponent);
    nvfp4_qat_nvfp4_act.gemms = {GemmRole::fprop}, nvfp4_qat_nvfp4_act.backward = BackwardOperands::dequantized;
    std::vector<std::pair<std::string, RecipeConfig>> named = {{"high", high},
                                                               {"bf16", bf16},
                                                               {"fp32", fp32},
                                                               {"mxfp8", mxfp8},
                                                               {"mxfp8_te", mxfp8_te},
                                                               {"mxfp8_weights", mxfp8_weights},
                                                               {"fp8_block", fp8_block},
                                                               {"mxfp4_qat", mxfp4_qat},
                                                               {"mxfp4_qat_mxfp8_act", mxfp4_qat_mxfp8_act},
                                                               {"mxfp4_qat_mxfp4_act", mxfp4_qat_mxfp4_act},
                                                               {"nvfp4_qat", nvfp4_qat},
                                                               {"nvfp4_qat_nvfp4_act", nvfp4_qat_nvfp4_act}};
    for (auto& [name, recipe] : named) recipe.base = name;
    return named;
  }();
  return table;
}

// Fills one operand of an own recipe from the same one of its base.
void complete_operand(std::optional<QuantizationConfig>& operand, const std::optional<QuantizationConfig>& base, const std::string& key,
                      ConfigReport& report) {
  if (!report.given(key)) {
    operand = base;
    return report.derive(key);
  }
  if (!operand) return;
  // NVFP4 has one form: what is not given comes neither from a base of another format to it, nor from it to another format.
  const bool two_levels = operand->format == Format::nvfp4, of_base = base && base->format == Format::nvfp4;
  const QuantizationConfig own = nvfp4(key.ends_with(".input") ? kInputExponent : kWeightExponent);
  const QuantizationConfig* source = base ? &*base : nullptr;
  if (two_levels && !of_base) source = &own;
  if (of_base && operand->format && !two_levels) source = nullptr;
  const auto take = [&](const char* name, auto member) {
    if (report.given(key + "." + name)) return;
    if (source) (*operand).*member = (*source).*member;
    report.derive(key + "." + name);
  };
  take("format", &QuantizationConfig::format);
  take("block", &QuantizationConfig::block);
  take("rule", &QuantizationConfig::rule);
  take("scale_range", &QuantizationConfig::scale_range);
  take("tensor_exponent", &QuantizationConfig::tensor_exponent);
}

// A base may read codes along columns where the recipe has none.
bool has_columns(const RecipeConfig& recipe) {
  const auto quantizes = [&](GemmRole role) { return std::ranges::find(recipe.gemms, role) != recipe.gemms.end(); };
  const bool of_weight = recipe.weight && !recipe.weight->block.empty() && recipe.weight->block.front() == 1 && quantizes(GemmRole::dgrad);
  return of_weight || (recipe.input && quantizes(GemmRole::fprop) && quantizes(GemmRole::wgrad));
}

void complete(RecipeConfig& recipe, const std::string& key, ConfigReport& report) {
  const std::optional<RecipeConfig> base = find_preset(recipe.base);
  if (!base) {
    const std::vector<std::string> names = preset_names();
    return report.error(key + ".base", "no preset \"" + shortened(recipe.base) + "\"" + did_you_mean(recipe.base, names) + " (there are " +
                                           joined(names) + ")");
  }
  complete_operand(recipe.weight, base->weight, key + ".weight", report);
  complete_operand(recipe.input, base->input, key + ".input", report);
  complete_operand(recipe.output_grad, base->output_grad, key + ".output_grad", report);
  complete_operand(recipe.weight_fake_quant, base->weight_fake_quant, key + ".weight_fake_quant", report);
  for (const auto& [name, operand, of_base] :
       {std::tuple{".weight_fake_quant", &recipe.weight_fake_quant, &base->weight_fake_quant}, {".input", &recipe.input, &base->input}}) {
    if (*operand && !(*of_base && (*of_base)->format != Format::nvfp4) && (*operand)->format == Format::e2m1 &&
        !report.given(key + name + ".rule"))
      (*operand)->rule = ScaleRule::flashinfer;
  }
  const auto take = [&](const char* name, auto member) {
    if (report.given(key + "." + name)) return;
    recipe.*member = (*base).*member;
    report.derive(key + "." + name);
  };
  take("compute", &RecipeConfig::compute);
  take("simulate", &RecipeConfig::simulate);
  take("gemms", &RecipeConfig::gemms);
  take("columns", &RecipeConfig::columns);
  take("backward", &RecipeConfig::backward);
  if (recipe.backward != BackwardOperands::quantized) {  // then dgrad and wgrad quantize nothing, whatever the base lists
    if (!report.given(key + ".gemms")) std::erase_if(recipe.gemms, [](GemmRole role) { return role != GemmRole::fprop; });
    if (!report.given(key + ".output_grad")) recipe.output_grad.reset();
  }
  if (!report.given(key + ".columns") && !has_columns(recipe)) recipe.columns = ColumnSource::rows;
}

// Like the next ones, returns false if there were problems, which it reports under `key`.
bool check_block(const std::vector<int64_t>& block, const std::string& key, ConfigReport& report) {
  if (block.size() == 2) return true;
  report.error(key + ".block", text("must be [rows, columns], got a list of ", block.size()));
  return false;
}

bool read_operand(const std::optional<QuantizationConfig>& config, const std::string& key, ConfigReport& report, Quantization& how) {
  if (!config) return true;
  if (!config->format) {
    report.error(key + ".format", "is missing: e4m3, e5m2, e2m1 or nvfp4");
    return false;
  }
  if (!check_block(config->block, key, report)) return false;
  const std::vector<int64_t>& range = config->scale_range;
  if (range.size() != 2 || range[0] < -127 || range[0] > 0 || range[1] < 0 || range[1] > 127) {
    report.error(key + ".scale_range", "must be [least, largest], of exponents from -127 to 0 and from 0 to 127");
    return false;
  }
  if (config->tensor_exponent < -kMostTensorExponent || config->tensor_exponent > kMostTensorExponent) {
    report.error(key + ".tensor_exponent", text("must be from ", -kMostTensorExponent, " to ", kMostTensorExponent));
    return false;
  }
  how = {.format = *config->format,
         .block_rows = config->block[0],
         .block_cols = config->block[1],
         .rule = config->rule,
         .range = {.least = static_cast<uint8_t>(range[0] + 127), .most = static_cast<uint8_t>(range[1] + 127)},
         .tensor_exponent = static_cast<int8_t>(config->tensor_exponent)};
  return true;
}

bool read_simulation(const std::optional<SimulationConfig>& config, const std::string& key, ConfigReport& report, Simulation& how) {
  if (!config) return true;
  const std::string& written = config->format;  // as "e3m2"
  const bool formed = written.size() == 4 && written[0] == 'e' && written[2] == 'm';
  const int exponent = formed ? written[1] - '0' : 0, mantissa = formed ? written[3] - '0' : 0;
  if (exponent < 1 || exponent > FreeElement::kMostExponentBits || mantissa < 0 || mantissa > FreeElement::kMostMantissaBits) {
    report.error(key + ".format", text("must be eXmY with X from 1 to ", FreeElement::kMostExponentBits, " and Y from 0 to ",
                                       FreeElement::kMostMantissaBits, ", got \"", shortened(written), '"'));
    return false;
  }
  if (!check_block(config->block, key, report)) return false;
  how = {.element = {.exponent_bits = exponent, .mantissa_bits = mantissa},
         .block_rows = config->block[0],
         .block_cols = config->block[1],
         .scale = config->scale,
         .rule = config->rule,
         .rounding = config->rounding};
  return true;
}

bool read_gemms(const std::vector<GemmRole>& roles, const std::string& key, ConfigReport& report, GemmSet& gemms) {
  for (const GemmRole role : roles) {
    bool& member = role == GemmRole::fprop ? gemms.fprop : role == GemmRole::dgrad ? gemms.dgrad : gemms.wgrad;
    if (member) {
      report.error(key, text("lists ", gemm_name(role), " twice"));
      return false;
    }
    member = true;
  }
  return true;
}

std::optional<Recipe> read_recipe(const std::string& name, const RecipeConfig& config, Dtype dtype, const std::string& key,
                                  ConfigReport& report) {
  Recipe recipe{.name = name, .compute = config.compute.value_or(dtype), .columns = config.columns, .backward = config.backward};
  bool right = read_operand(config.weight, key + ".weight", report, recipe.weight);
  right = read_operand(config.input, key + ".input", report, recipe.input) && right;
  right = read_operand(config.output_grad, key + ".output_grad", report, recipe.output_grad) && right;
  right = read_operand(config.weight_fake_quant, key + ".weight_fake_quant", report, recipe.weight_fake_quant) && right;
  right = read_gemms(config.gemms, key + ".gemms", report, recipe.gemms) && right;
  if (config.simulate) {
    const SimulateConfig& simulate = *config.simulate;
    SimulatedOperands& simulated = recipe.simulated;
    const std::string section = key + ".simulate";
    bool read = read_simulation(simulate.weight, section + ".weight", report, simulated.weight);
    read = read_simulation(simulate.input, section + ".input", report, simulated.input) && read;
    read = read_simulation(simulate.output_grad, section + ".output_grad", report, simulated.output_grad) && read;
    read = read_gemms(simulate.hadamard_gemms, section + ".hadamard_gemms", report, simulated.hadamard_gemms) && read;
    simulated.hadamard = simulate.hadamard;
    if (read && !simulated.any()) report.error(section, "names no operand: give weight, input or output_grad, or make it null");
    right = read && simulated.any() && right;
  }
  if (!right) return std::nullopt;
  const std::vector<RecipeProblem> problems = recipe_problems(recipe);
  for (const RecipeProblem& problem : problems) report.error(key + "." + problem.key, problem.message);
  if (!problems.empty()) return std::nullopt;
  const bool as_gemms_say = recipe.backward == BackwardOperands::high_precision && !recipe.weight_fake_quant;
  if (as_gemms_say) recipe.backward = BackwardOperands::quantized;  // equal computations have one plan
  return recipe;
}

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& [name, recipe] : presets()) names.push_back(name);
  return names;
}

std::optional<RecipeConfig> find_preset(const std::string& name) {
  const auto found = std::find_if(presets().begin(), presets().end(), [&](const auto& entry) { return entry.first == name; });
  if (found == presets().end()) return std::nullopt;
  return found->second;
}

Recipe preset_recipe(const std::string& name, Dtype dtype) {
  const std::optional<RecipeConfig> preset = find_preset(name);
  require(preset.has_value(), "no preset \"", name, "\"");
  ConfigReport report;
  const std::optional<Recipe> recipe = read_recipe(name, *preset, dtype, name, report);
  report.throw_if_failed();
  return *recipe;
}

void complete_recipes(PrecisionConfig& config, ConfigReport& report) {
  for (auto& [name, recipe] : config.recipes) {
    const std::string key = "precision.recipes." + name;
    if (find_preset(name)) {
      report.key_error(key, "is the name of a preset; give it another name, and \"base\": \"" + name + "\" to start from the preset");
    } else {
      complete(recipe, key, report);
    }
  }
}

std::map<std::string, Recipe> resolve_recipes(const PrecisionConfig& config, ConfigReport& report) {
  std::map<std::string, Recipe> recipes;
  for (const std::string& name : preset_names()) recipes[name] = preset_recipe(name, config.dtype);
  for (const auto& [name, own] : config.recipes) {
    const std::string key = "precision.recipes." + name;
    if (report.failed(key)) continue;
    if (const std::optional<Recipe> recipe = read_recipe(name, own, config.dtype, key, report)) recipes[name] = *recipe;
  }
  return recipes;
}

template const FieldType& detail::field_type<PrecisionConfig>();

}  // namespace mantissa
