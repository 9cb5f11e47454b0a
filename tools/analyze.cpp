// Shows what recipes cost a saved model, without training it.
#include "train/analyze.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <memory>
#include <sstream>

#include "hf/export.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"
#include "plan/plan_table.h"
#include "tools/command.h"
#include "tools/report/read_progress.h"

namespace mantissa::tools {
namespace {

struct AnalyzeArguments {
  std::string model, recipes = "mxfp8,mxfp4_qat", device = "auto";
  std::vector<std::string> precision;
  int threads = 0;
  bool json = false, wide = false;
};

struct Analysis {
  std::string model;
  std::optional<int64_t> step;  // step of a checkpoint
  ExaminedRecipe high;
  std::vector<ExaminedRecipe> recipes;
  std::vector<ExaminedWeight> weights;
};

std::vector<std::string> names_of_recipes(const std::string& list) {
  std::vector<std::string> names;
  for (const std::string& name : split(list, ',')) {
    require(!name.empty(), ExitCode::usage, "--recipes: the name of a recipe is missing in \"", printable(shortened(list)), '"');
    require(std::ranges::find(names, name) == names.end(), ExitCode::usage, "--recipes: names ", printable(shortened(name)), " twice");
    names.push_back(name);
  }
  return names;
}

Analysis analysis_of(const AnalyzeArguments& arguments) {
  const std::vector<std::string> names = names_of_recipes(arguments.recipes);
  for (const std::string& set : arguments.precision)
    require(!set.starts_with("precision.recipe="), ExitCode::usage, "--set ", printable(shortened(set)), ": name recipes with --recipes");
  ExportSource source(arguments.model, device_of("cpu"));
  const RunConfig& config = source.model->config;
  const bool folder = source.folder != nullptr;
  const ModelUse more{.precision = arguments.precision};
  Analysis out{.model = arguments.model,
               .step = source.checkpoint ? std::optional(source.checkpoint->manifest().step) : std::nullopt,
               .high = examined_recipes(config, folder, {"high"}, {}).front(),
               .recipes = examined_recipes(config, folder, names, more),
               .weights = {}};
  const std::unique_ptr<Backend> device = device_of(arguments.device);
  out.weights = with_read_progress(bytes_of_weights(arguments.model), [&] { return weight_errors(*source.reader, out.recipes, *device); });
  require(!out.weights.empty(), ExitCode::usage, "--recipes ", printable(arguments.recipes),
          ": they quantize no weight, so there is nothing to measure");
  return out;
}

// The errors of the same module of several layers, or of one, under one recipe.
struct Pooled {
  std::vector<std::string> paths;
  double signal = 0.0, noise = 0.0, elements = 0.0, clipped = 0.0, flushed = 0.0;
  std::optional<double> worst_db, worst_block_db;
  std::string worst;  // the module with the least ratio
  std::optional<ErrorParts> parts;
  int64_t bytes = 0;

  void add(const WeightError& error) {
    const PrecisionEvent& figures = error.figures;
    const auto count = static_cast<double>(error.elements);
    paths.push_back(figures.module);
    signal += error.signal, noise += error.noise, elements += count;
    clipped += figures.clipped * count, flushed += figures.flushed * count;
    bytes += error.bytes;
    if (figures.sqnr_db && (!worst_db || *figures.sqnr_db < *worst_db)) worst_db = figures.sqnr_db, worst = figures.module;
    if (const auto& block = error.worst_block; block && (!worst_block_db || block->sqnr_db < *worst_block_db))
      worst_block_db = block->sqnr_db;
    if (!error.parts) return;
    if (!parts) parts.emplace();
    parts->add(*error.parts);
  }
  std::optional<double> sqnr_db() const { return decibels(signal, noise); }
};

// Pools equal modules of all layers, or none; the order is that of the model.
std::vector<Pooled> pooled(const Analysis& analysis, size_t recipe, bool each) {
  std::vector<Pooled> pools;
  for (const ExaminedWeight& weight : analysis.weights) {
    if (!weight.errors[recipe]) continue;
    const auto same = [&](const Pooled& pool) { return any_layer(pool.paths.front()) == any_layer(weight.module); };
    auto pool = each ? pools.end() : std::ranges::find_if(pools, same);
    if (pool == pools.end()) pool = pools.insert(pools.end(), Pooled());
    pool->add(*weight.errors[recipe]);
  }
  return pools;
}

std::string rounded(double value, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << value;
  return std::move(out).str();
}

std::string db_text(const std::optional<double>& db) { return db ? rounded(*db, 2) : "-"; }
std::string share_text(double part, double whole) { return whole > 0.0 ? rounded(100.0 * part / whole, 2) + "%" : "-"; }

std::string table_of(const Analysis& analysis, size_t recipe, bool wide) {
  std::vector<std::vector<std::string>> rows = {
      {"module", "SQNR dB", "worst", "block", "clipped", "flushed", "scale", "dead zone", "grid", "bytes"}};
  for (const Pooled& pool : pooled(analysis, recipe, wide)) {
    const ErrorParts parts = pool.parts.value_or(ErrorParts{});
    const double error = parts.total();
    rows.push_back({joined_path(pool.paths), db_text(pool.sqnr_db()), db_text(pool.worst_db), db_text(pool.worst_block_db),
                    share_text(pool.clipped, pool.elements), share_text(pool.flushed, pool.elements), share_text(parts.scale, error),
                    share_text(parts.dead_zone, error), share_text(parts.grid, error), bytes_text(pool.bytes)});
  }
  return aligned(rows);
}

void print_recipe(const Analysis& analysis, size_t number, bool wide) {
  const ExaminedRecipe& recipe = analysis.recipes[number];
  Pooled all;
  for (const Pooled& pool : pooled(analysis, number, true)) {
    all.signal += pool.signal, all.noise += pool.noise;
    if (pool.worst_db && (!all.worst_db || *pool.worst_db < *all.worst_db)) all.worst_db = pool.worst_db, all.worst = pool.worst;
    all.paths.push_back(pool.paths.front());
  }
  const StoredSize linears = stored_size(recipe.plan, true), size = stored_size(recipe.plan, false);
  std::cout << '\n'
            << printable(recipe.name) << " | " << count_text(all.paths.size(), "weight") << " | SQNR " << db_text(all.sqnr_db())
            << " dB | worst " << (all.worst.empty() ? "-" : text(all.worst, ' ', db_text(all.worst_db), " dB")) << " | "
            << rounded(linears.bits(), 3) << " bits per weight of the linears | model " << bytes_text(size.bytes) << ", in high precision "
            << bytes_text(stored_size(analysis.high.plan, false).bytes) << '\n';
  if (!recipe.misfits.empty())
    std::cout << printable(recipe.name) << " | " << count_text(recipe.misfits.size(), "linear")
              << " in high precision: " << printable(recipe.problem, "\n  ") << '\n';
  if (!all.paths.empty()) std::cout << printable(table_of(analysis, number, wide), "\n");
}

Json json_of(const WeightError& error) {
  const PrecisionEvent& figures = error.figures;
  Json out = {{"module", figures.module},   {"elements", error.elements}, {"bytes", error.bytes},
              {"sqnr_db", figures.sqnr_db}, {"clipped", figures.clipped}, {"flushed", figures.flushed},
              {"amax", figures.amax},       {"signal", error.signal},     {"noise", error.noise}};
  Json::Members scales;
  for (const auto& [code, blocks] : figures.scales) scales[std::to_string(code)] = blocks;
  out.add("scales", std::move(scales));
  if (const auto& parts = error.parts)
    out.add("parts", Json{{"dead_zone", parts->dead_zone}, {"scale", parts->scale}, {"grid", parts->grid}});
  if (const auto& block = error.worst_block)
    out.add("worst_block", Json{{"sqnr_db", block->sqnr_db}, {"row", block->row}, {"column", block->column}});
  if (const auto& expert = figures.worst_expert) out.add("worst_expert", Json{{"expert", expert->expert}, {"sqnr_db", expert->sqnr_db}});
  return out;
}

Json json_of(const StoredSize& size) { return {{"elements", size.elements}, {"bytes", size.bytes}, {"bits_per_weight", size.bits()}}; }

Json json_of(const Analysis& analysis) {
  Json::Entries recipes;
  for (size_t i = 0; i < analysis.recipes.size(); ++i) {
    const ExaminedRecipe& recipe = analysis.recipes[i];
    Json::Entries weights;
    for (const ExaminedWeight& weight : analysis.weights) {
      if (weight.errors[i]) weights.push_back(json_of(*weight.errors[i]));
    }
    Json entry = {{"recipe", recipe.name},
                  {"set", recipe.values},
                  {"linears", json_of(stored_size(recipe.plan, true))},
                  {"model", json_of(stored_size(recipe.plan, false))},
                  {"misfits", recipe.misfits},
                  {"weights", weights}};
    if (!recipe.problem.empty()) entry.add("problem", recipe.problem);
    recipes.push_back(std::move(entry));
  }
  return {
      {"model", analysis.model}, {"step", analysis.step}, {"high", json_of(stored_size(analysis.high.plan, false))}, {"recipes", recipes}};
}

void print_text(const Analysis& analysis, bool wide) {
  const StoredSize high = stored_size(analysis.high.plan, false);
  std::cout << printable(analysis.model) << (analysis.step ? text(" of step ", *analysis.step) : "") << " | " << high.elements
            << " parameters\n";
  for (size_t i = 0; i < analysis.recipes.size(); ++i) print_recipe(analysis, i, wide);
}

ExitCode run_analyze(const AnalyzeArguments& arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  use_threads(arguments.threads);
  const Analysis analysis = analysis_of(arguments);
  if (arguments.json) {
    std::cout << json_of(analysis).dump(1, Json::Order::keys) << '\n';
  } else {
    print_text(analysis, arguments.wide);
  }
  return ExitCode::ok;
}

}  // namespace

Command analyze_command() {
  const auto arguments = std::make_shared<AnalyzeArguments>();
  return {.name = "analyze",
          .summary = "show what recipes cost a saved model, without training it",
          .example = "mantissa analyze runs/quickstart\nmantissa analyze SmolLM2-135M --recipes mxfp8,mxfp4_qat,fp8_block --wide",
          .options = {{"MODEL", &arguments->model, "a checkpoint or a run, a folder in Hugging Face's form, or a GGUF file"},
                      {"--recipes", &arguments->recipes, "names of recipes to compare, separated by commas"},
                      {"--set", &arguments->precision,
                       "precision.KEY=VALUE for all recipes, as in precision.rules or, for recipes of your own, precision.recipes; "
                       "repeatable. Rules of the run do not count"},
                      {"--wide", &arguments->wide, "a line for each module; else equal modules of all layers share one"},
                      {"--json", &arguments->json, "one JSON object, with every module by itself"},
                      device_option(arguments->device),
                      threads_option(arguments->threads)},
          .run = [arguments] { return run_analyze(*arguments); }};
}

}  // namespace mantissa::tools
