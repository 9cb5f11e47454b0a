#include "train/analyze.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <span>

#include "checkpoint/saved_model.h"
#include "json/json_fields.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "mantissa/precision/rules.h"

namespace mantissa {
namespace {

RunConfig used_by(const RunConfig& config, bool of_folder, const ModelUse& use) { return for_ranks(as_used(config, of_folder, use), {}); }

// Returns the linears that have the ambient recipe.
std::vector<ModuleShape> ambient_linears(const PrecisionPlan& plan) {
  std::vector<ModuleShape> linears;
  for (const ModulePrecision& module : plan.modules()) {
    if (module.module.kind == ModuleKind::linear && module.match.empty()) linears.push_back(module.module);
  }
  return linears;
}

std::vector<std::string> paths_of(const std::vector<ModuleShape>& modules) {
  std::vector<std::string> paths;
  for (const ModuleShape& module : modules) paths.push_back(module.path);
  return paths;
}

// Returns true if a recipe can be that of these modules; of none: if it is one.
bool fits(const std::vector<ModuleShape>& modules, PrecisionConfig ambient) {
  ambient.rules.clear();
  ambient.fp8_output_proj = {};
  ConfigReport report;
  PrecisionPlan::resolve(ambient, {.modules = modules}, report);
  return report.ok();
}

ExaminedRecipe examined(const RunConfig& config, bool of_folder, const std::string& name, ModelUse use) {
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), use.precision.begin(), use.precision.end());
    return more;
  };
  use.precision = with({"precision.recipe=" + name});
  const RunConfig whole = used_by(config, of_folder, use);
  std::string problem;
  try {
    return {.name = name, .values = use.precision, .plan = resolve_plan(whole)};
  } catch (const Error& error) {
    problem = error.what();
  }
  // Something does not fit. It may be linears alone, which can keep their values.
  ModelUse high = use;
  high.precision = with({"precision.recipe=high", R"(precision.fp8_output_proj={"enabled": false})"});
  const std::vector<ModuleShape> linears = ambient_linears(resolve_plan(used_by(config, of_folder, high)));
  std::vector<std::string> misfits;
  for (const ModuleShape& linear : linears) {
    if (!fits({linear}, whole.precision)) misfits.push_back(linear.path);
  }
  require(!misfits.empty() && fits({}, whole.precision), ExitCode::usage, problem);
  if (misfits.size() == linears.size()) {
    const PrecisionPlan plan = resolve_plan(used_by(config, of_folder, high));
    return {.name = name, .values = high.precision, .plan = plan, .misfits = misfits, .problem = problem, .fits = false};
  }
  std::vector<RuleConfig> rules = whole.precision.rules;
  for (const std::string& pattern : patterns_of(misfits, paths_of(linears))) rules.push_back({.match = pattern, .recipe = "high"});
  use.precision = with({rules_value(rules)});
  return {
      .name = name, .values = use.precision, .plan = resolve_plan(used_by(config, of_folder, use)), .misfits = misfits, .problem = problem};
}

// Reads matrix number `matrix` of a weight as training rounds it before it makes codes. Rows of padding are zeros.
Tensor rounded_matrix(TensorReader& source, const ModuleShape& module, int64_t matrix, Backend& device) {
  constexpr int64_t kElements = int64_t{4} << 20;
  const std::string name = module.weight_name();
  const int64_t first = matrix * module.out, stored = module.out - module.padding, columns = module.in;
  const Tensor out =
      module.padding > 0 ? zeros(device, Dtype::bf16, {module.out, columns}) : empty(device, Dtype::bf16, {module.out, columns});
  const WeightForm form = source.form(name);
  const int64_t step = std::max<int64_t>(1, kElements / columns);
  for (int64_t begin = 0; begin < stored; begin += step) {
    const int64_t end = std::min(stored, begin + step);
    const Box box{.start = {first + begin, 0}, .size = {end - begin, columns}};
    const Tensor rows = out.slice(begin, end);
    if (!form.master && !form.codes && form.dtype == Dtype::bf16) {
      fill_from_host(rows, [&](std::span<std::byte> bytes) { source.read(name, box, bytes); });
    } else {
      const Tensor wide = empty(device, Dtype::f32, rows.shape());
      fill_from_host(wide, [&](std::span<std::byte> bytes) {
        source.read_fp32(name, box, {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)});
      });
      device.run(Convert{.x = wide, .out = rows});
    }
    const std::optional<NonfiniteElement> bad = nonfinite_element(rows);
    if (bad)
      fail(ExitCode::data, source.where(), ": ", name, "[", first + begin + bad->index / columns, ", ", bad->index % columns, "] is ",
           bad->value, ": it cannot be quantized");
  }
  return out;
}

// The form in which a recipe reads a weight in fprop: codes, values of a format without codes, or neither.
struct WeightFormat {
  Quantization codes = {};
  Simulation simulated = {};

  bool operator==(const WeightFormat& other) const = default;
  explicit operator bool() const { return static_cast<bool>(codes) || static_cast<bool>(simulated); }
};

WeightFormat format_of(const ModulePrecision& module) {
  if (!has_gemm(module.module.kind) && !module.module.is_token_table()) return {};
  const OperandChoice fprop = choose_operands(module.recipe, GemmRole::fprop).second;
  return {.codes = module.resident_codes(), .simulated = fprop.source == OperandSource::simulated ? fprop.simulation : Simulation{}};
}

// Measures a weight in each of these formats, reading every matrix once.
std::vector<WeightError> errors_in(TensorReader& source, const ModuleShape& module, const std::vector<WeightFormat>& formats,
                                   Backend& device) {
  std::vector<WeightErrors> sums(formats.size(), WeightErrors(module.matrices));
  for (int64_t matrix = 0; matrix < module.matrices; ++matrix) {
    const Tensor rounded = rounded_matrix(source, module, matrix, device);
    for (size_t i = 0; i < formats.size(); ++i) {
      if (formats[i].codes) {
        sums[i].add(rounded, quantized(rounded, formats[i].codes));
      } else {
        sums[i].add(rounded, formats[i].simulated);
      }
    }
  }
  std::vector<WeightError> out;
  for (const WeightErrors& each : sums) {
    out.push_back(each.result());
    out.back().figures.module = module.path;
  }
  return out;
}

}  // namespace

std::vector<std::string> examined_values(const ModelUse& more) {
  std::vector<std::string> values = {"precision.rules=[]", R"(precision.fp8_output_proj={"enabled": false})"};
  values.insert(values.end(), more.precision.begin(), more.precision.end());
  return values;
}

RunConfig examined_config(const RunConfig& config, bool of_folder, const ModelUse& more) {
  return used_by(config, of_folder, {.dtype = more.dtype, .precision = examined_values(more)});
}

std::string rules_value(const std::vector<RuleConfig>& rules) {
  Json::Entries entries;
  for (const RuleConfig& rule : rules) entries.push_back(Json{{"match", rule.match}, {"recipe", rule.recipe}});
  return "precision.rules=" + Json(entries).dump();
}

std::vector<ExaminedRecipe> examined_recipes(const RunConfig& config, bool of_folder, const std::vector<std::string>& names,
                                             const ModelUse& more) {
  const ModelUse use{.dtype = more.dtype, .precision = examined_values(more)};
  std::vector<ExaminedRecipe> recipes;
  recipes.reserve(names.size());
  for (const std::string& name : names) recipes.push_back(examined(config, of_folder, name, use));
  require(std::ranges::any_of(recipes, &ExaminedRecipe::fits), ExitCode::usage, recipes.front().problem);
  return recipes;
}

std::vector<std::string> patterns_of(const std::vector<std::string>& chosen, const std::vector<std::string>& all) {
  std::map<std::string, size_t> count;
  for (const std::string& path : all) ++count[any_layer(path)];
  std::map<std::string, std::vector<std::string>> layers;  // by the path with any layer
  for (const std::string& path : chosen) layers[any_layer(path)].push_back(path);
  std::vector<std::string> patterns;
  for (const auto& [pattern, paths] : layers) {
    if (paths.size() == 1 || paths.size() == count[pattern]) {
      patterns.push_back(paths.size() == 1 ? paths.front() : pattern);
      continue;
    }
    std::string listed = pattern;
    patterns.push_back(
        listed.replace(listed.find('*'), 1, "{" + joined(paths, ",", [](const std::string& path) { return split(path, '.')[1]; }) + "}"));
  }
  return patterns;
}

std::vector<ExaminedWeight> weight_errors(TensorReader& source, const std::vector<ExaminedRecipe>& recipes, Backend& device) {
  std::vector<ExaminedWeight> weights;
  for (size_t i = 0; i < recipes.front().plan.modules().size(); ++i) {
    std::vector<WeightFormat> formats, of_recipe;
    for (const ExaminedRecipe& recipe : recipes) {
      const WeightFormat format = of_recipe.emplace_back(format_of(recipe.plan.modules()[i]));
      if (format && std::ranges::find(formats, format) == formats.end()) formats.push_back(format);
    }
    if (formats.empty()) continue;
    const ModuleShape& module = recipes.front().plan.modules()[i].module;
    const std::vector<WeightError> errors = errors_in(source, module, formats, device);
    ExaminedWeight& weight = weights.emplace_back(ExaminedWeight{.module = module.path, .errors = {}});
    for (const WeightFormat& format : of_recipe) {
      const auto found = std::ranges::find(formats, format);
      weight.errors.push_back(found == formats.end() ? std::nullopt : std::optional(errors[static_cast<size_t>(found - formats.begin())]));
    }
  }
  source.require_unchanged();
  return weights;
}

StoredSize stored_size(const PrecisionPlan& plan, bool linears_alone) {
  StoredSize size;
  for (const ModulePrecision& entry : plan.modules()) {
    const ModuleShape& module = entry.module;
    if (linears_alone && module.kind != ModuleKind::linear) continue;
    const int64_t weights = module.weight_elements(), values = dtype_bytes(entry.recipe.compute);
    size.elements += weights;
    if (const Quantization& how = entry.resident_codes()) {
      size.bytes +=
          (is_four_bit(how.format) ? weights / 2 : weights) + ceil_div(module.rows(), how.block_rows) * ceil_div(module.in, how.block_cols);
    } else {
      size.bytes += weights * values;
    }
    if (linears_alone) continue;
    size.elements += module.bias;
    size.bytes += module.bias * values;
  }
  return size;
}

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

// Spends `left` bytes, which remain because the last steps overshot: gives one part another recipe, or two at a time, as long as the sum of
// the costs falls.
void fill(const std::vector<ModelPart>& parts, const std::vector<PartInRecipe>& choices, double left, std::vector<int64_t>& bytes,
          std::vector<double>& costs, std::vector<std::string>& recipes) {
  std::vector<PartInRecipe> all = choices;
  for (size_t i = 0; i < parts.size(); ++i) all.push_back({.part = i, .recipe = kHigh, .bytes = parts[i].high_bytes});
  const auto more = [&](const PartInRecipe& to) { return static_cast<double>(to.bytes - bytes[to.part]); };
  const auto rise = [&](const PartInRecipe& to) { return to.cost - costs[to.part]; };
  while (true) {
    const PartInRecipe *one = nullptr, *two = nullptr;
    double best = -1e-12;  // sums of costs are rounded: a change for less could be taken back for ever
    const auto consider = [&](const PartInRecipe& a, const PartInRecipe* b) {
      const double change = rise(a) + (b ? rise(*b) : 0.0);
      if (change < best && more(a) + (b ? more(*b) : 0.0) <= left) best = change, one = &a, two = b;
    };
    for (const PartInRecipe& a : all) {
      consider(a, nullptr);
      for (const PartInRecipe& b : all)
        if (b.part != a.part && rise(a) < 0.0) consider(a, &b);
    }
    if (!one) return;
    for (const PartInRecipe* to : {one, two}) {
      if (!to) continue;
      left -= more(*to);
      bytes[to->part] = to->bytes, costs[to->part] = to->cost, recipes[to->part] = to->recipe;
    }
  }
}

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
  fill(parts, choices, static_cast<double>(elements) * bits / 8.0 - static_cast<double>(all), bytes, costs, out.recipes);
  all = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
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
