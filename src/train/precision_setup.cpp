#include "mantissa/train/precision_setup.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include "mantissa/backend/functions.h"
#include "mantissa/base/hash.h"
#include "mantissa/base/json.h"
#include "mantissa/base/log.h"
#include "mantissa/precision/code_hash.h"
#include "mantissa/train/events.h"

namespace mantissa {
namespace {

using nlohmann::json;

json entry_of(const WeightCodes& weight) {
  return {{"how", weight.how}, {"codes_sum", Hash64{weight.sums.codes}.text()}, {"values_sum", Hash64{weight.sums.values}.text()}};
}

// What the products of a module read; gemms follows from the others and from what the recipe lists.
constexpr std::array kFormats = {"compute", "weight", "input", "output_grad", "weight_fake_quant", "gemms"};

bool same_formats(const json& a, const json& b) {
  return std::all_of(kFormats.begin(), kFormats.end(), [&](const char* key) { return a.value(key, json()) == b.value(key, json()); });
}

// "mxfp8 -> high"; where the recipes have one name, what it meant and means: "mine (input null -> {...})".
std::string change_of(const json& before, const json& now) {
  const auto name = [](const json& module) {
    const json recipe = module.value("recipe", json());
    return recipe.is_string() ? recipe.get<std::string>() : recipe.dump();
  };
  if (name(before) != name(now)) return name(before) + " -> " + name(now);
  std::string list;
  for (const char* key : kFormats) {
    const json was = before.value(key, json()), is = now.value(key, json());
    const bool follows = key == kFormats.back() && !list.empty();
    if (was != is && !follows) list += text(list.empty() ? "" : ", ", key, ' ', was.dump(), " -> ", is.dump());
  }
  return name(now) + " (" + list + ")";
}

// One line for all layers that change alike.
struct PlanChange {
  std::string what;
  std::vector<std::string> paths;
};

std::map<std::string, json> modules_by_path(const json& plan, const std::string& source) {
  require(plan.is_object() && plan.contains("modules") && plan["modules"].is_array(), ExitCode::data, source,
          ": plan must be an object with a list \"modules\"");
  std::map<std::string, json> modules;
  for (const json& module : plan["modules"]) {
    const bool good = module.is_object() && module.contains("module") && module["module"].is_string();
    require(good, ExitCode::data, source, ": plan.modules must be objects with a string \"module\"");
    modules[module["module"].get<std::string>()] = module;
  }
  return modules;
}

const json& module_of(const std::map<std::string, json>& modules, const std::string& path, const std::string& source) {
  const auto found = modules.find(path);
  require(found != modules.end(), ExitCode::data, source, ": plan.modules has no ", path);
  return found->second;
}

std::vector<PlanChange> changes_between(const std::map<std::string, json>& before, const json& now, const std::string& source) {
  std::vector<PlanChange> changes;
  for (const json& module : now.at("modules")) {
    const std::string path = module.at("module").get<std::string>();
    const json& was = module_of(before, path, source);
    if (same_formats(was, module)) continue;
    const std::string what = change_of(was, module);
    const auto alike = std::find_if(changes.begin(), changes.end(), [&](const PlanChange& change) {
      return change.what == what && any_layer(change.paths.front()) == any_layer(path);
    });
    if (alike == changes.end()) {
      changes.push_back({.what = what, .paths = {path}});
    } else {
      alike->paths.push_back(path);
    }
  }
  return changes;
}

void refuse(const std::vector<std::string>& changes, const std::string& source) {
  constexpr size_t kShown = 4;
  std::string list;
  for (size_t i = 0; i < std::min(kShown, changes.size()); ++i) list += "\n  " + changes[i];
  if (changes.size() > kShown) list += text("\n  and ", changes.size() - kShown, " more");
  require(changes.empty(), ExitCode::usage, source, ": this run asks for other recipes than the checkpoint was trained with:", list,
          "\ncontinue with its recipes, or set checkpoint.allow_recipe_change to true to go on with the new ones");
}

}  // namespace

CodesByWeight codes_by_weight(const ParameterSet& parameters, const std::vector<Part>& own, const Communicator& ranks) {
  std::map<const Parameter*, size_t> place;
  for (const Parameter& parameter : parameters.all()) {
    if (parameter.quantised) place.emplace(&parameter, place.size());
  }
  std::vector<CodeSums> all(place.size() * static_cast<size_t>(ranks.size()));
  const auto mine = std::span(all).subspan(place.size() * static_cast<size_t>(ranks.rank()), place.size());
  for (const Part& part : own) {
    if (!part.of->quantised) continue;
    const QuantizedTensor& whole = part.of->codes();
    for (const Part::Slab& slab : part.slabs()) {
      const CodePlace at{
          .rows = slab.end - slab.begin, .columns = part.of->stored_shape()[-1], .first_row = slab.row, .first_col = slab.column};
      const int64_t end = slab.end == part.stored_end() ? part.end : slab.end;  // whole blocks
      mine[place.at(part.of)] += code_sums(slice(whole, slab.begin, end), at);
    }
  }
  const std::vector<int64_t> counts(static_cast<size_t>(ranks.size()), static_cast<int64_t>(mine.size_bytes()));
  ranks.all_gather(std::as_writable_bytes(std::span(all)), counts, Purpose::control);
  CodesByWeight codes;
  for (const auto& [parameter, index] : place) {
    WeightCodes& weight = codes[parameter->name];
    weight.how = text(parameter->quantised);
    for (size_t i = index; i < all.size(); i += place.size()) weight.sums += all[i];
  }
  return codes;
}

std::string plan_manifest(const PrecisionPlan& plan, const CodesByWeight& codes) {
  json out = plan.to_json();
  out["quantised"] = json::object();
  for (const auto& [name, weight] : codes) out["quantised"][name] = entry_of(weight);
  return out.dump();
}

std::vector<std::string> allowed_plan_changes(const std::string& saved, const PrecisionPlan& plan, const std::string& source,
                                              LoadFor purpose) {
  const json before = parse_strict_json(saved, source);
  if (before.is_null()) return {};  // written before there were plans: high precision in one dtype, which the config shows
  std::vector<std::string> allowed, refused;
  for (const PlanChange& change : changes_between(modules_by_path(before, source), plan.to_json(), source)) {
    const bool may = purpose == LoadFor::resume_changed || change.paths.front() == "output";
    (may ? allowed : refused).push_back(joined_path(change.paths) + ": " + change.what);
  }
  refuse(refused, source);
  return allowed;
}

std::string precision_text(const PrecisionConfig& config) {
  std::string out = text(dtype_name(config.dtype), ", ", config.recipe);
  if (!config.rules.empty()) out += ", " + count_text(static_cast<int64_t>(config.rules.size()), "rule");
  if (config.fp8_output_proj.enabled) out += ", fp8_output_proj";
  if (config.fp8_param_gather) out += ", fp8_param_gather";
  return out;
}

void require_same_codes(const std::string& saved, const PrecisionPlan& plan, const CodesByWeight& codes, const std::string& source,
                        LoadFor purpose) {
  const json manifest = parse_strict_json(saved, source);
  if (manifest.is_null()) return;
  const std::map<std::string, json> before = modules_by_path(manifest, source);
  const auto quantised = manifest.find("quantised");
  require(quantised != manifest.end() && quantised->is_object(), ExitCode::data, source, ": plan.quantised must be an object");
  const json now = plan.to_json();
  bool older = false;
  for (const json& module : now.at("modules")) {
    const std::string path = module.at("module").get<std::string>(), name = path + ".weight";
    const auto weight = codes.find(name);
    if (weight == codes.end()) continue;
    const json was = quantised->value(name, json());
    const bool same_codes_asked = was.is_object() && was.value("how", json()) == weight->second.how;
    if (!same_codes_asked && !same_formats(module_of(before, path, source), module)) continue;
    const json is = entry_of(weight->second);
    const bool hashed_whole = was.is_object() && was.contains("codes") && !was.contains("codes_sum");
    older = older || hashed_whole;
    if (was == is || hashed_whole) continue;
    const std::string message =
        text(source, ": plan.quantised: the codes of ", name, " are not those the checkpoint was written with: ", was.dump(), " there, ",
             is.dump(), " from its master");
    require(purpose == LoadFor::resume_changed, ExitCode::data, message, "\nthe checkpoint is damaged, or this build quantises otherwise",
            purpose == LoadFor::resume ? "; checkpoint.allow_recipe_change goes on with the new codes" : "");
    log_warning(message);
  }
  if (older) log_warning(source, ": plan.quantised has hashes of whole tensors, as once was done; they are not compared");
}

}  // namespace mantissa
