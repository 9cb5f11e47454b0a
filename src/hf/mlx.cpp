#include "hf/mlx.h"

#include <algorithm>
#include <map>

#include "hf/hf_weights.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "models/model_shape.h"

namespace mantissa {
namespace {

struct MlxDifference {
  const char* option;  // that of section "model"
  bool (*differs)(Architecture architecture, const ModelConfig& model);
  const char* what;  // mlx-lm does
};

bool has_windows(const ModelConfig& model, bool wanted) {
  for (int64_t layer = 0; layer < model.num_layers; ++layer)
    if ((model.window(layer) > 0) == wanted) return true;
  return false;
}

bool heads_fill_width(const ModelConfig& model) { return model.head_size() * model.num_attention_heads == model.hidden_size; }

constexpr MlxDifference kMlxDifferences[] = {
    {"swiglu_limit", [](Architecture of, const ModelConfig& model) { return of == Architecture::gpt_oss && model.glu_limit() != 7.0; },
     "clamps at 7"},
    {"rope_scaling.attention_factor",
     [](Architecture, const ModelConfig& model) { return model.rope_scaling && model.rope_scaling->attention_factor; },
     "takes that of factor, mscale and mscale_all_dim"},
    {"rope_scaling.truncate",
     [](Architecture, const ModelConfig& model) {
       return model.rope_scaling && model.rope_scaling->type == RopeScaling::yarn && !model.rope_scaling->truncate.value_or(true);
     },
     "begins and ends the blend at whole channels"},
    {"rope_scaling",
     [](Architecture of, const ModelConfig& model) {
       return (of == Architecture::qwen3_moe || of == Architecture::mixtral) && model.rope_scaling;
     },
     "does not scale rotations of this architecture"},
    {"sliding_window", [](Architecture of, const ModelConfig& model) { return of != Architecture::gpt_oss && has_windows(model, true); },
     "has no windows in this architecture: every token sees all before it"},
    {"sliding_layers",
     [](Architecture of, const ModelConfig& model) {
       return of == Architecture::gpt_oss && (!has_windows(model, true) || !has_windows(model, false));
     },
     "cannot load a gpt-oss without layers of both kinds, with a window and without"},
    {"head_dim",
     [](Architecture of, const ModelConfig& model) {
       return (of == Architecture::qwen2 || of == Architecture::mixtral) && !heads_fill_width(model);
     },
     "takes hidden_size / num_attention_heads in this architecture, and cannot load others"},
    {"attention_bias",
     [](Architecture of, const ModelConfig& model) {
       return (of == Architecture::qwen3 || of == Architecture::qwen3_moe) && model.attention_bias != AttentionBias::none;
     },
     "has no biases of attention in this architecture, and cannot load them"},
    {"activation",
     [](Architecture of, const ModelConfig& model) { return of == Architecture::gpt2 && model.activation != Activation::gelu_tanh; },
     "computes gelu_tanh"},
    {"intermediate_size",
     [](Architecture of, const ModelConfig& model) { return of == Architecture::gpt2 && model.intermediate_size != 4 * model.hidden_size; },
     "takes 4 * hidden_size in GPT-2, and cannot load others"},
    {"tie_word_embeddings",
     [](Architecture of, const ModelConfig& model) { return of == Architecture::gpt2 && !model.tie_word_embeddings; },
     "ties those of GPT-2, and cannot load an output projection"},
    {"tie_word_embeddings",
     [](Architecture of, const ModelConfig& model) { return of == Architecture::gpt_oss && model.tie_word_embeddings; },
     "ties none of gpt-oss, and cannot load it without an output projection"},
};

}  // namespace

std::vector<std::string> mlx_differences(Architecture architecture, const ModelConfig& model) {
  std::vector<std::string> found;
  for (const MlxDifference& one : kMlxDifferences)
    if (one.differs(architecture, model)) found.push_back(text("model.", one.option, ": mlx-lm ", one.what));
  return found;
}

std::string mlx_quantization(const PackedModules& modules) {
  const auto count = [&](Format format) {
    return std::ranges::count_if(modules, [&](const auto& module) { return module.second && module.second->format == format; });
  };
  const auto mode = [](Format format) {
    return Json{{"group_size", packed_form(format).block_cols},
                {"bits", is_four_bit(format) ? 4 : 8},
                {"mode", format == Format::nvfp4  ? "nvfp4"
                         : format == Format::e2m1 ? "mxfp4"
                                                  : "mxfp8"}};
  };
  const Format common = std::ranges::max({Format::e4m3, Format::e2m1, Format::nvfp4}, {}, count);
  Json quantization = mode(common);
  for (const auto& [name, scheme] : modules) {
    if (!scheme) {
      quantization.add(name, false);
    } else if (scheme->format != common) {
      quantization.add(name, mode(scheme->format));
    }
  }
  Json keys = {{"quantization", std::move(quantization)}};
  if (std::ranges::any_of(modules, [](const auto& module) { return module.second && module.second->inputs != Format::none; }))
    keys.add("quantize_activations", true);
  return keys.dump(-1, Json::Order::keys);
}

MlxTypes mlx_types(const HfWeights& folder, Dtype trained) {
  MlxTypes out{.architecture = folder.config().architecture, .trained = trained};
  const auto is_table = [](const std::string& parameter) { return parameter == "embed.weight" || parameter == "position.weight"; };
  const FileDtype embedding = folder.type_in_file("embed.weight");
  const bool codes = folder.form("embed.weight").codes != Quantization{};
  out.activations = codes ? FileDtype::bf16 : embedding;
  out.at_once = true;
  for (const ArchitectureTensor& tensor : folder.tensors()) {
    if (tensor.parameter == "embed.weight" || tensor.parameter.find(".router.") != std::string::npos) continue;
    if (out.activations == FileDtype::f32) break;
    const FileDtype type = folder.type_in_file(tensor.parameter);
    const bool value = type == FileDtype::f32 || type == FileDtype::bf16 || type == FileDtype::f16;
    if (value && type != out.activations) {
      out.activations = FileDtype::f32;
      out.widened_by = tensor.name;
    } else if (!is_table(tensor.parameter)) {
      out.at_once = false;
    }
  }
  const std::map<std::string, PackedScheme> packed = folder.packed_modules();
  out.mxfp8_inputs = std::ranges::any_of(packed, [](const auto& module) { return module.second.inputs != Format::none; });
  return out;
}

std::string mlx_rounding(const MlxTypes& types) {
  const bool until_router = types.architecture == Architecture::mixtral || types.architecture == Architecture::gpt_oss;
  const char* const inputs = types.mxfp8_inputs ? " with inputs of packed linears in MXFP8" : "";
  if (types.activations == FileDtype::f32) {
    const std::string wide = types.widened_by.empty() ? "" : text(", because ", types.widened_by, " is F32");
    if (!types.widened_by.empty() && !types.at_once)
      return text("mlx-lm computes", inputs, " in bf16 up to ", types.widened_by, " and in fp32 from there on", wide, "; forward here in ",
                  types.trained);
    return text("mlx-lm computes in fp32", inputs, types.as_forward ? " and rounds nothing that forward here does not" : "",
                types.trained == Dtype::f32 ? ""
                : types.as_forward          ? ", which computes in bf16"
                                            : "; forward here computes in bf16",
                wide);
  }
  const char* const narrow = types.activations == FileDtype::f16 ? "fp16" : "bf16";
  const char* const where = until_router ? "before the first router" : "everywhere";
  if (types.activations == FileDtype::f16 || types.trained == Dtype::f32)
    return text("mlx-lm", types.mxfp8_inputs ? " has inputs of packed linears in MXFP8 and" : "", " rounds activations to ", narrow, ' ',
                where, ", which forward here does not");
  return text("mlx-lm computes in bf16", inputs, types.as_forward ? " as forward here does" : "", ", and rounds ", where,
              " to bf16 what that keeps in fp32 within an operation: SiLU before it is multiplied, a product before its bias is added");
}

std::string mlx_inputs_need(const HfWeights& folder) {
  const std::map<std::string, PackedScheme> packed = folder.packed_modules();
  const auto count = std::ranges::count_if(packed, [](const auto& module) { return module.second.inputs != Format::none; });
  if (count == 0) return "";
  return text("mlx-lm quantizes inputs of ", count_text(count, "module"),
              " to MXFP8 (quantize_activations), which MLX computes on GPUs (Metal) and not on CPUs (\"[QQMatmul] NYI\"): for these take "
              "dequantized weights, or train with the recipe mxfp8_weights");
}

}  // namespace mantissa
