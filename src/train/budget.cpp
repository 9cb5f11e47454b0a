#include "train/budget.h"

#include <algorithm>
#include <map>

#include "json/json_fields.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "mantissa/precision/rules.h"

namespace mantissa {
namespace {

constexpr const char* kHigh = "high";

// A part that may take fewer bytes.
struct Step {
  const PartInRecipe* to = nullptr;
  double rate = 0.0;  // rise of the cost for each byte

  void consider(const PartInRecipe& choice, int64_t bytes, double cost) {
    if (choice.bytes >= bytes) return;
    const double rise = (choice.cost - cost) / static_cast<double>(bytes - choice.bytes);
    if (!to || rise < rate) to = &choice, rate = rise;
  }
};

}  // namespace

std::vector<ModelPart> model_parts(const PrecisionPlan& plan, int64_t most) {
  std::vector<std::string> kinds;
  std::map<std::string, std::vector<const ModulePrecision*>> of_kind;
  for (const ModulePrecision& entry : plan.modules()) {
    if (entry.module.kind != ModuleKind::linear) continue;
    std::vector<const ModulePrecision*>& list = of_kind[any_layer(entry.module.path)];
    if (list.empty()) kinds.push_back(any_layer(entry.module.path));
    list.push_back(&entry);
  }
  std::vector<ModelPart> parts;
  for (const std::string& kind : kinds) {
    const std::vector<const ModulePrecision*>& list = of_kind[kind];
    const int64_t count = std::ssize(list), pieces = std::clamp<int64_t>(most / std::ssize(kinds), 1, count);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      ModelPart& part = parts.emplace_back();
      for (int64_t i = count * piece / pieces; i < count * (piece + 1) / pieces; ++i) {
        const ModulePrecision& entry = *list[static_cast<size_t>(i)];
        part.modules.push_back(entry.module.path);
        part.elements += entry.module.weight_elements();
        part.high_bytes += entry.module.weight_elements() * dtype_bytes(entry.recipe.compute);
      }
    }
  }
  return parts;
}

Proposal propose(const std::vector<ModelPart>& parts, const std::vector<PartInRecipe>& choices, double bits) {
  std::vector<int64_t> bytes;
  std::vector<double> costs(parts.size(), 0.0);
  int64_t all = 0, elements = 0;
  for (const ModelPart& part : parts) {
    bytes.push_back(part.high_bytes);
    all += part.high_bytes;
    elements += part.elements;
  }
  const auto mean = [&] { return 8.0 * static_cast<double>(all) / static_cast<double>(elements); };
  Proposal out{.recipes = std::vector<std::string>(parts.size(), kHigh)};
  while (mean() > bits) {
    Step next;
    for (const PartInRecipe& choice : choices) next.consider(choice, bytes[choice.part], costs[choice.part]);
    require(next.to != nullptr, ExitCode::usage, "the recipes reach no fewer than ", mean(), " bits per weight of the linears, and ", bits,
            " were asked for");
    const PartInRecipe& taken = *next.to;
    all += taken.bytes - bytes[taken.part];
    bytes[taken.part] = taken.bytes;
    costs[taken.part] = taken.cost;
    out.recipes[taken.part] = taken.recipe;
  }
  out.bits = mean();
  for (const double cost : costs) out.cost += cost;
  return out;
}

std::string proposal_text(const std::vector<ModelPart>& parts, const Proposal& proposal, const PrecisionConfig& precision) {
  std::vector<std::string> all;
  std::map<std::string, std::vector<std::string>> modules;  // by recipe
  for (size_t i = 0; i < parts.size(); ++i) {
    all.insert(all.end(), parts[i].modules.begin(), parts[i].modules.end());
    std::vector<std::string>& of_recipe = modules[proposal.recipes[i]];
    of_recipe.insert(of_recipe.end(), parts[i].modules.begin(), parts[i].modules.end());
  }
  const auto ambient = std::ranges::max_element(modules, {}, [](const auto& entry) { return entry.second.size(); });
  Json::Entries rules;
  Json::Members recipes;
  for (const auto& [name, paths] : modules) {
    if (const auto own = precision.recipes.find(name); own != precision.recipes.end())
      recipes[name] = parse_json(json_text(own->second), name, ExitCode::internal);
    if (name == ambient->first) continue;
    for (const std::string& pattern : patterns_of(paths, all)) rules.push_back(Json{{"match", pattern}, {"recipe", name}});
  }
  Json section = {{"recipe", ambient->first}};
  if (!recipes.empty()) section.add("recipes", recipes);
  section.add("rules", rules);
  Json file;
  file.add("precision", section);
  return file.dump(1, Json::Order::keys) + "\n";
}

}  // namespace mantissa
