#include "mantissa/train/precision_setup.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "mantissa/backend/functions.h"
#include "mantissa/base/json.h"
#include "mantissa/io/hash.h"

namespace mantissa {
namespace {

using nlohmann::json;

std::span<const std::byte> bytes_of(const Tensor& tensor) { return {tensor.raw(), static_cast<size_t>(tensor.bytes())}; }

json hashes(const QuantizedTensor& codes) {
  const Tensor values = empty(codes.device(), Dtype::f32, codes.shape);
  codes.device().run(Dequantize{.x = codes, .out = values});
  std::string both(static_cast<size_t>(codes.bytes()), '\0');
  std::memcpy(both.data(), codes.codes.raw(), static_cast<size_t>(codes.codes.bytes()));
  std::memcpy(both.data() + codes.codes.bytes(), codes.scales.raw(), static_cast<size_t>(codes.scales.bytes()));
  return {{"how", text(codes.how)}, {"codes", hex64(xxh64(std::string_view(both)))}, {"values", hex64(xxh64(bytes_of(values)))}};
}

bool keeps_codes_only(StoredType storage) { return storage != StoredType::fp32 && storage != StoredType::bf16; }

// What the products of a module read.
json formats(const json& module) {
  json out;
  for (const char* key : {"compute", "weight", "input", "output_grad", "weight_fake_quant", "gemms"}) out[key] = module.value(key, json());
  return out;
}

}  // namespace

GptOptions model_options(const RunConfig& config, Recompute recompute, bool gradients) {
  const auto plan = std::make_shared<const PrecisionPlan>(resolve_plan(config));
  return {.compute = config.precision.dtype, .recompute = recompute, .gradients = gradients, .precision = [plan](const std::string& path) {
            const ModulePrecision& module = plan->of(path);
            return WeightPrecision{.recipe = module.recipe, .codes_only = keeps_codes_only(module.storage)};
          }};
}

std::string plan_manifest(const RunConfig& config, const ParameterSet& parameters) {
  json out = resolve_plan(config).to_json();
  out["quantised"] = json::object();
  for (const Parameter& parameter : parameters.all()) {
    if (parameter.codes.defined()) out["quantised"][parameter.name] = hashes(parameter.codes);
  }
  return out.dump();
}

void require_same_plan(const std::string& saved, const RunConfig& config, const std::string& source) {
  const json before = parse_strict_json(saved, source), now = resolve_plan(config).to_json();
  if (before.is_null()) return;  // written before there were plans: high precision in one dtype, which the config shows
  std::map<std::string, json> modules;
  for (const json& module : before.at("modules")) modules[module.at("module").get<std::string>()] = formats(module);
  for (const json& module : now.at("modules")) {
    const std::string path = module.at("module").get<std::string>();
    if (path == "output" || modules[path] == formats(module)) continue;
    fail(ExitCode::usage, source, ": ", path, " was trained with the formats ", modules[path].dump(), ", and this run asks for ",
         formats(module).dump(), "; continue with the recipe of the checkpoint, or set checkpoint.allow_recipe_change to true");
  }
}

}  // namespace mantissa
