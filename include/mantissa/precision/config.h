// Defines the section "precision" of a run configuration, expresses the presets in its terms, and makes Recipes of it.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/json/config.h"
#include "mantissa/precision/recipe.h"

namespace mantissa {

constexpr auto choices(Dtype) { return std::array{Choice{"fp32", Dtype::f32}, Choice{"bf16", Dtype::bf16}}; }
constexpr auto choices(Format) {
  return std::array{Choice{"e4m3", Format::e4m3}, Choice{"e5m2", Format::e5m2}, Choice{"e2m1", Format::e2m1},
                    Choice{"nvfp4", Format::nvfp4}};
}
constexpr auto choices(ScaleRule) {
  return std::array{Choice{"rceil", ScaleRule::rceil},    Choice{"floor", ScaleRule::floor},           Choice{"even", ScaleRule::even},
                    Choice{"ceil", ScaleRule::ceil},      Choice{"flashinfer", ScaleRule::flashinfer}, Choice{"mse", ScaleRule::mse},
                    Choice{"nearest", ScaleRule::nearest}};
}
constexpr auto choices(SimulatedScale) { return std::array{Choice{"e8m0", SimulatedScale::e8m0}, Choice{"e4m3", SimulatedScale::e4m3}}; }
constexpr auto choices(Rounding) { return std::array{Choice{"nearest", Rounding::nearest}, Choice{"stochastic", Rounding::stochastic}}; }
constexpr auto choices(GemmRole) {
  return std::array{Choice{"fprop", GemmRole::fprop}, Choice{"dgrad", GemmRole::dgrad}, Choice{"wgrad", GemmRole::wgrad}};
}

constexpr auto choices(ColumnSource) { return std::array{Choice{"rows", ColumnSource::rows}, Choice{"values", ColumnSource::values}}; }
constexpr auto choices(BackwardOperands) {
  return std::array{Choice{"quantized", BackwardOperands::quantized}, Choice{"dequantized", BackwardOperands::dequantized},
                    Choice{"high_precision", BackwardOperands::high_precision}};
}

struct QuantizationConfig {
  std::optional<Format> format;  // needed
  std::vector<int64_t> block = {1, 32};
  ScaleRule rule = ScaleRule::rceil;
  std::vector<int64_t> scale_range = {-127, 127};
  int64_t tensor_exponent = 0;

  void fields(auto& v) {
    v("format", format, "element format; nvfp4: e2m1 with e4m3 scales under a scale of the tensor, for weight_fake_quant and input");
    v("block", block,
      "rows and columns that share a scale: [1, 32] or [1, 128], along the contraction; for weight also [32, 32] or [128, 128]; "
      "for weight_fake_quant [1, n] with any even n; of nvfp4 [1, 16], its default");
    v("rule", rule,
      "how a block's scale follows from its amax; mse: the least squared error; flashinfer is for weight_fake_quant and input in e2m1 "
      "only, and their default if the base has no rule; nearest and mse are those of nvfp4");
    v("scale_range", scale_range,
      "smallest and largest exponent of a scale; scales of the rule are clamped to them; not for flashinfer. [-126, 125] is the clamp of "
      "Transformer Engine, [-22, 127] that of DeepSeek for activations in e4m3");
    v("tensor_exponent", tensor_exponent,
      "of nvfp4, n from -60 to 60: the scale of the tensor is 2^n. Blocks have scales from 2^(n-9) to 448 * 2^n, with all their digits "
      "from 2^(n-6) on, and elements up to 2688 * 2^n. The default is -8 for weights and -2 for inputs");
  }
};

struct SimulationConfig {
  std::string format;  // needed
  std::vector<int64_t> block = {1, 32};
  SimulatedScale scale = SimulatedScale::e8m0;
  ScaleRule rule = ScaleRule::rceil;
  Rounding rounding = Rounding::nearest;

  void fields(auto& v) {
    v("format", format, "eXmY: X from 1 to 7 bits of exponent and Y from 0 to 7 of mantissa, in any combination");
    v("block", block, "rows and columns that share a scale: [1, n], along the contraction of each GEMM, or tiles");
    v("scale", scale, "e8m0: a power of two; e4m3: an E4M3 number for each block and an fp32 number for the tensor, as NVFP4");
    v("rule", rule, "how an e8m0 scale follows from the amax of its block; not flashinfer, mse or nearest");
    v("rounding", rounding,
      "rounding of elements; stochastic is used in training, with the same bits in every layout, and nearest elsewhere");
  }
};

// Operands that are multiplied as values of a format that no device has.
struct SimulateConfig {
  std::optional<SimulationConfig> weight, input, output_grad;
  int64_t hadamard = 0;
  std::vector<GemmRole> hadamard_gemms;

  void fields(auto& v) {
    v("weight", weight, "weight operand; null: not simulated");
    v("input", input, "input operand of fprop and wgrad; null: not simulated");
    v("output_grad", output_grad, "gradient operand of dgrad and wgrad; null: not simulated");
    v("hadamard", hadamard, "16 or 32: length of the blocks of the randomized Hadamard transform; 0: none");
    v("hadamard_gemms", hadamard_gemms, "GEMMs whose two operands are transformed along the contraction before they are rounded");
  }
};

// A preset with changes. After complete_recipes() every member has its effective value.
struct RecipeConfig {
  std::string base = "high";
  std::optional<Dtype> compute;
  std::optional<QuantizationConfig> weight, input, output_grad, weight_fake_quant;
  std::optional<SimulateConfig> simulate = {};
  std::vector<GemmRole> gemms;
  ColumnSource columns = ColumnSource::rows;
  BackwardOperands backward = BackwardOperands::quantized;

  void fields(auto& v) {
    v("base", base,
      "preset that the other keys change: high, bf16, fp32, mxfp8, mxfp8_te, mxfp8_weights, fp8_block, mxfp4_qat, mxfp4_qat_mxfp8_act, "
      "mxfp4_qat_mxfp4_act, nvfp4_qat, nvfp4_qat_nvfp4_act");
    v("compute", compute, "type of operands that are not quantized; null: precision.dtype");
    v("weight", weight, "weight operand; null: not quantized; excludes weight_fake_quant");
    v("input", input, "input operand of fprop and wgrad, of fprop alone in four bits; null: not quantized");
    v("output_grad", output_grad, "gradient operand of dgrad and wgrad; null: not quantized");
    v("weight_fake_quant", weight_fake_quant, "rounds the weight in forward, straight-through gradient; block [1, n] with any even n");
    v("simulate", simulate, "operands in formats for research, as values; null: none");
    v("gemms", gemms, "GEMMs that take quantized operands");
    v("columns", columns,
      "source of columnwise codes, of inputs for wgrad and of weights in blocks of one row for dgrad: rows: requantized from the rowwise "
      "codes; values: quantized from the values, as in Transformer Engine");
    v("backward", backward,
      "what dgrad and wgrad read for fprop's quantized operands: quantized: as gemms says; dequantized: the values of fprop's codes; "
      "high_precision: the values before quantization, also of a fake-quantized weight");
  }
};

struct RuleConfig {
  std::string match, recipe;

  void fields(auto& v) {
    v("match", match, "modules: anchored glob (* ? {a,b}, layers.{0,-1}), or re: and a regular expression");
    v("recipe", recipe, "preset or custom recipe");
  }
};

// Says which GEMMs of the MXFP8 output projection take the formats of the ambient recipe.
struct OutputProjectionConfig {
  static constexpr const char* kShortForm = "enabled";
  bool enabled = false, fprop = true, dgrad = true, wgrad = true;

  void fields(auto& v) {
    v("enabled", enabled, "quantize the output projection by the ambient recipe");
    v("fprop", fprop, "its forward GEMM");
    v("dgrad", dgrad, "its input-gradient GEMM");
    v("wgrad", wgrad, "its weight-gradient GEMM");
  }
};

// Selects how a device multiplies codes: as codes where its library can, or always as the values that they stand for, as a CPU does.
enum class NativeProducts { automatic, never };
constexpr auto choices(NativeProducts) {
  return std::array{Choice{"auto", NativeProducts::automatic}, Choice{"never", NativeProducts::never}};
}

// Selects how the library of a GPU multiplies groups of rows, those of experts: all at once where it can, which no GPU has confirmed yet,
// or one after the other.
enum class GroupedGemms { automatic, never };
constexpr auto choices(GroupedGemms) { return std::array{Choice{"auto", GroupedGemms::automatic}, Choice{"never", GroupedGemms::never}}; }

struct PrecisionConfig {
  Dtype dtype = Dtype::bf16;  // dtype of activations and of the weights that GEMMs read; masters and statistics are fp32 either way
  std::string recipe = "high";
  std::map<std::string, RecipeConfig> recipes;
  std::vector<RuleConfig> rules;
  OutputProjectionConfig fp8_output_proj;
  bool fp8_param_gather = false;
  bool quantized_dispatch = true;
  NativeProducts native_products = NativeProducts::automatic;
  GroupedGemms grouped_gemms = GroupedGemms::never;
  int64_t report_interval = 0;

  void fields(auto& v) {
    v("dtype", dtype, "compute type of activations and GEMM operands; master weights are fp32");
    v("recipe", recipe, "ambient recipe, that of every linear that no rule matches");
    v("recipes", recipes, "custom recipes by name");
    v("rules", rules, "recipes of single modules; the first rule that matches wins");
    v("fp8_output_proj", fp8_output_proj, "MXFP8 output projection; a bool stands for {\"enabled\": it}");
    v("fp8_param_gather", fp8_param_gather, "keep and gather weights as MXFP8 codes only; masters are in the optimizer");
    v("quantized_dispatch", quantized_dispatch,
      "dispatch tokens to experts, and their gradients back, as codes where the GEMMs there read codes; false: as values");
    v("native_products", native_products,
      "auto: a GPU multiplies codes natively where its tensor cores can; never: it dequantizes them first, as a CPU does");
    v("grouped_gemms", grouped_gemms,
      "auto: cuBLASLt 13.10 and later multiplies all experts in one call, which no GPU has confirmed; never: one after the other");
    v("report_interval", report_interval, "steps between error statistics per module and role; 0: none", limits::between(0, 1e12));
  }
};
extern template const FieldType& detail::field_type<PrecisionConfig>();

std::vector<std::string> preset_names();
// Returns the preset of that name; none if there is none.
std::optional<RecipeConfig> find_preset(const std::string& name);
// Throws Error(internal) for a name that is no preset. `dtype` is precision.dtype.
Recipe preset_recipe(const std::string& name, Dtype dtype = Dtype::bf16);

// Fills in what the own recipes leave out: members from their base, members of a quantization from that of the base. It asks the report
// which keys were given. Calling it again, or for a config that was written out, changes nothing.
void complete_recipes(PrecisionConfig& config, ConfigReport& report);

// Returns all recipes by name, presets included. Own recipes must be complete; an invalid one is reported and left out.
std::map<std::string, Recipe> resolve_recipes(const PrecisionConfig& config, ConfigReport& report);

}  // namespace mantissa
