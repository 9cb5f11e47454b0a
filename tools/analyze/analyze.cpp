// Shows what recipes cost a saved model, without training it.
#include <algorithm>
#include <array>
#include <cmath>
#include <iostream>
#include <memory>

#include "base/file.h"
#include "data/batch.h"
#include "hf/export.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "tools/analyze/analysis.h"
#include "tools/command.h"
#include "tools/evaluation_data.h"
#include "tools/report/read_progress.h"

namespace mantissa::tools {
namespace {

struct AnalyzeArguments : EvaluationArguments {
  std::string model, device = "auto";
  std::vector<std::string> precision, precision_files;
  std::optional<std::string> recipes, dtype, output;
  std::optional<int64_t> modules;
  std::optional<double> budget;
  int threads = 0;
  bool json = false, wide = false;
};

constexpr int64_t kParts = 64;  // measured alone unless --modules says otherwise

constexpr const char* kRecipes = "mxfp8,mxfp4_qat";

// Takes the recipe out of the values for precision.*, such as a proposal of --budget has, for which --recipes has a list. Throws
// Error(usage) for a value that is none of the key.
std::optional<std::string> take_recipe(std::vector<std::string>& precision) {
  const auto others = std::stable_partition(precision.begin(), precision.end(), [](const std::string& set) {
    return !set.starts_with("precision.recipe=") && !set.starts_with("precision.recipe.");
  });
  const std::vector<std::string> own(others, precision.end());
  precision.erase(others, precision.end());
  if (own.empty()) return {};
  return with_precision({}, own).precision.recipe;  // read as every command reads it
}

std::vector<std::string> names_of_recipes(const std::string& list) {
  std::vector<std::string> names;
  for (const std::string& name : split(list, ',')) {
    require(!name.empty(), ExitCode::usage, "--recipes: the name of a recipe is missing in \"", printable(shortened(list)), '"');
    require(std::ranges::find(names, name) == names.end(), ExitCode::usage, "--recipes: names ", printable(shortened(name)), " twice");
    names.push_back(name);
  }
  return names;
}

void check(const AnalyzeArguments& arguments) {
  check_evaluation(arguments);
  for (const std::string& set : arguments.precision) {
    const auto sets = [&](const char* key) { return set.starts_with(text("precision.", key)); };
    require(!(arguments.modules || arguments.budget) || (!sets("rules") && !sets("fp8_output_proj")), ExitCode::usage, "--set ",
            printable(shortened(set)),
            ": excludes --modules and --budget, which measure linears alone "
            "and write rules of their own");
  }
  const std::array<std::pair<const char*, bool>, 7> of_data = {{{"--chat-template", arguments.chat_template.has_value()},
                                                                {"--seq-len", arguments.seq_len.has_value()},
                                                                {"--iters", arguments.iters.has_value()},
                                                                {"--micro-batch-size", arguments.micro_batch_size.has_value()},
                                                                {"--modules", arguments.modules.has_value()},
                                                                {"--budget", arguments.budget.has_value()},
                                                                {"--dtype", arguments.dtype.has_value()}}};
  for (const auto& [name, given] : of_data)
    require(arguments.data || !given, ExitCode::usage, name, ": needs data, on which losses are measured: give --data FILE");
  require(arguments.modules.value_or(1) > 0, ExitCode::usage, "--modules: must be positive, got ", arguments.modules.value_or(1));
  const double budget = arguments.budget.value_or(1.0);
  require(std::isfinite(budget) && budget > 0.0, ExitCode::usage, "--budget: must be positive, got ", budget);
  require(arguments.budget || !arguments.output, ExitCode::usage,
          "--output: is the file of the rules that --budget proposes: give "
          "that, too");
  if (arguments.output) require_output_file(*arguments.output);
  if (arguments.data) expand_paths(*arguments.data);
}

ModelUse use_of(const AnalyzeArguments& arguments) { return {.dtype = dtype_of(arguments.dtype), .precision = arguments.precision}; }

// Finds the recipes and measures the weights.
Analysis measured_weights(const AnalyzeArguments& arguments, const std::vector<std::string>& names, ExportSource& source) {
  const RunConfig& config = source.model->config;
  const bool folder = source.folder != nullptr;
  const ModelUse use = use_of(arguments);
  Analysis out{.model = arguments.model,
               .step = source.checkpoint ? std::optional(source.checkpoint->manifest().step) : std::nullopt,
               .high = examined_recipes(config, folder, {"high"}, {.dtype = use.dtype}).front(),
               .recipes = examined_recipes(config, folder, names, use)};
  const std::unique_ptr<Backend> device = device_of(arguments.device);
  out.weights = with_read_progress(bytes_of_weights(arguments.model), [&] { return weight_errors(*source.reader, out.recipes, *device); });
  require(arguments.data || !out.weights.empty(), ExitCode::usage, "--recipes ", printable(joined(names, ",")),
          ": they quantize no weight, so there is nothing to measure; --data "
          "FILE measures losses");
  return out;
}

// Measures losses: of the model in high precision, of one in each recipe, and
// of one with a part in a recipe, of which two are there at a time.
class LossMeasurement {
 public:
  LossMeasurement(const AnalyzeArguments& arguments, const ExportSource& source, Analysis& analysis)
      : arguments_(arguments), config_(source.model->config), folder_(source.folder != nullptr), analysis_(analysis) {}

  void measure() {
    high_.emplace(loaded(analysis_.high.values));
    DataConfig config;
    const Data data = validation_data(arguments_, *high_, config);
    for (const std::string& warning : data_warnings(config, data, "--seq-len")) log_warning(warning);
    open_log({.level = LogLevel::error, .console = true, .file = {}});  // loading the model again would repeat its warnings
    const int64_t rows = rows_of(arguments_, *high_);
    if (arguments_.modules || arguments_.budget) find_parts();
    const auto fitting = static_cast<size_t>(std::ranges::count(analysis_.recipes, true, &ExaminedRecipe::fits));
    const auto evaluations = static_cast<int64_t>(1 + fitting + choices_.size() + (arguments_.budget ? 1 : 0));
    CountProgress progress("analyze", evaluations * micro_batches_of(arguments_, data, rows));
    const RecipeLosses losses(*high_->model, data.valid, rows, arguments_.iters, [&progress] { progress.begin_next(); });
    analysis_.data = *arguments_.data;
    analysis_.window = window_of(arguments_, *high_);
    analysis_.high_loss = finite(losses.high(), "high");
    for (const ExaminedRecipe& recipe : analysis_.recipes)
      analysis_.losses.push_back(recipe.fits ? finite(losses.of(*loaded(recipe.values).model), recipe.name) : RecipeLoss());
    for (PartLoss& alone : choices_) measure_part(losses, alone);
    if (arguments_.budget) propose_rules(losses);
    std::ranges::stable_sort(choices_, std::ranges::greater{}, [](const PartLoss& alone) { return alone.loss.kl; });
    analysis_.part_losses = std::move(choices_);
  }

 private:
  LoadedModel loaded(const std::vector<std::string>& values) const {
    return load_model(arguments_.model, device_of(arguments_.device), {}, {.dtype = dtype_of(arguments_.dtype), .precision = values});
  }
  static const RecipeLoss& finite(const RecipeLoss& loss, const std::string& of) {
    require(std::isfinite(loss.loss) && std::isfinite(loss.kl), ExitCode::numerical, printable(of), ": the loss is not finite");
    return loss;
  }

  // Finds the parts, and the recipes that quantize all of one.
  void find_parts() {
    analysis_.parts = model_parts(analysis_.high.plan, arguments_.modules.value_or(kParts));
    for (const ModelPart& part : analysis_.parts) linears_.insert(linears_.end(), part.modules.begin(), part.modules.end());
    for (const ExaminedRecipe& recipe : analysis_.recipes) {
      for (size_t i = 0; i < analysis_.parts.size(); ++i) {
        const std::vector<std::string>& modules = analysis_.parts[i].modules;
        const auto quantized = [&](const std::string& path) { return recipe.plan.of(path).recipe.quantizes(); };
        if (std::ranges::all_of(modules, quantized)) choices_.push_back({.part = i, .recipe = recipe.name});
      }
    }
    if (!arguments_.budget) add_table();
    require(!choices_.empty(), ExitCode::usage, arguments_.budget ? "--budget" : "--modules",
            ": the recipes quantize no part of the model");
    for (PartLoss& alone : choices_) {
      const PrecisionPlan plan = resolve_plan(examined_config(config_, folder_, use_of_part(alone)));
      alone.bytes = analysis_.parts[alone.part].high_bytes + stored_size(plan, false).bytes - stored_size(analysis_.high.plan, false).bytes;
    }
    if (arguments_.budget)
      propose(analysis_.parts, priced(), *arguments_.budget);  // refuses what is out of reach before anything is measured
  }

  // Adds the table of tokens as a part, which ambient recipes do not quantize, in those that can round it.
  void add_table() {
    const ModulePrecision& table = analysis_.high.plan.modules().front();
    const int64_t elements = table.module.weight_elements();
    analysis_.parts.push_back(
        {.modules = {table.module.path}, .elements = elements, .high_bytes = elements * dtype_bytes(table.recipe.compute)});
    const size_t choices = choices_.size();
    for (const ExaminedRecipe& recipe : analysis_.recipes) {
      const PartLoss alone{.part = analysis_.parts.size() - 1, .recipe = recipe.name};
      try {
        if (resolve_plan(examined_config(config_, folder_, use_of_part(alone))).of(table.module.path).recipe.quantizes())
          choices_.push_back(alone);
      } catch (const Error& error) {
        if (error.code() != ExitCode::usage) throw;
        analysis_.without_table.emplace_back(recipe.name, error.what());
      }
    }
    if (choices_.size() == choices) analysis_.parts.pop_back();
  }

  ModelUse use_of_part(const PartLoss& alone) const {
    std::vector<RuleConfig> rules;
    for (const std::string& pattern : patterns_of(analysis_.parts[alone.part].modules, linears_))
      rules.push_back({.match = pattern, .recipe = alone.recipe});
    ModelUse use = use_of(arguments_);
    use.precision.insert(use.precision.end(), {"precision.recipe=high", rules_value(rules)});
    return use;
  }

  void measure_part(const RecipeLosses& losses, PartLoss& alone) const {
    const ModelUse use = use_of_part(alone);
    const PrecisionPlan plan = resolve_plan(examined_config(config_, folder_, use));
    const std::unique_ptr<Gpt> model = with_plan(*high_->model, plan);
    alone.loss = finite(losses.of(model ? *model : *loaded(examined_values(use)).model), alone.recipe);
  }

  std::vector<PartInRecipe> priced() const {
    std::vector<PartInRecipe> out;
    for (const PartLoss& alone : choices_)
      out.push_back({.part = alone.part, .recipe = alone.recipe, .bytes = alone.bytes, .cost = alone.loss.kl});
    return out;
  }

  void propose_rules(const RecipeLosses& losses) {
    ProposedRules out{.proposal = propose(analysis_.parts, priced(), *arguments_.budget), .file = {}, .loss = {}};
    const RunConfig config = examined_config(config_, folder_, use_of(arguments_));
    out.file = proposal_text(analysis_.parts, out.proposal, config.precision);
    ModelUse use = use_of(arguments_);
    for (const std::string& value : precision_values(parse_json(out.file, "proposal", ExitCode::internal), "proposal"))
      use.precision.push_back(value);
    out.loss = finite(losses.of(*loaded(examined_values(use)).model), "the proposal");
    analysis_.proposed = std::move(out);
  }

  const AnalyzeArguments& arguments_;
  const RunConfig& config_;
  bool folder_;
  Analysis& analysis_;
  std::optional<LoadedModel> high_;
  std::vector<std::string> linears_;
  std::vector<PartLoss> choices_;
};

ExitCode run_analyze(AnalyzeArguments arguments) {
  open_log({.level = LogLevel::warning, .console = true, .file = {}});
  use_threads(arguments.threads);
  const std::optional<std::string> recipe = take_recipe(arguments.precision);
  require(!recipe || !arguments.recipes, ExitCode::usage, "precision.recipe ", printable(shortened(recipe.value_or(""))),
          ": excludes --recipes, which names all that are measured");
  check(arguments);
  const std::vector<std::string> names = recipe ? std::vector{*recipe} : names_of_recipes(arguments.recipes.value_or(kRecipes));
  ExportSource source(arguments.model, device_of("cpu"));
  Analysis analysis = measured_weights(arguments, names, source);
  if (arguments.data) LossMeasurement(arguments, source, analysis).measure();
  if (arguments.output) write_file_atomically(*arguments.output, analysis.proposed->file);
  if (arguments.json) {
    std::cout << analysis_json(analysis).dump(1, Json::Order::keys) << '\n';
  } else {
    print_analysis(analysis, arguments.wide);
    if (arguments.output) std::cout << printable(*arguments.output) << ": written; use it with --set-file\n";
    if (arguments.budget && !arguments.output) std::cout << printable(analysis.proposed->file, "\n");
  }
  return ExitCode::ok;
}

}  // namespace

Command analyze_command() {
  const auto arguments = std::make_shared<AnalyzeArguments>();
  std::vector<Option> options = {{"MODEL", &arguments->model,
                                  "a checkpoint or a run, a folder in Hugging Face's form, or a GGUF "
                                  "file"},
                                 {"--recipes", &arguments->recipes,
                                  text("names of recipes to compare, separated by commas; default: precision.recipe of --set-file or "
                                       "--set, else ",
                                       kRecipes)},
                                 precision_option(arguments->precision),
                                 precision_file_option(arguments->precision_files),
                                 {"--data", &arguments->data,
                                  "file or glob on which losses are measured; default: none, weights "
                                  "alone are measured"},
                                 {"--wide", &arguments->wide, "a line for each module; else equal modules of all layers share one"},
                                 {"--json", &arguments->json, "one JSON object, with every module by itself"},
                                 {"--modules", &arguments->modules,
                                  "with --data, quantize parts of the model alone, at most so many: one "
                                  "linear each or, where there are more, neighboring layers of it; without "
                                  "a budget also the embedding"},
                                 {"--budget", &arguments->budget,
                                  "with --data, propose recipes for the parts that take so many bits per "
                                  "weight of the linears; implies --modules 64"},
                                 {"--output", &arguments->output, "file for what --budget proposes, for --set-file; else it is printed"},
                                 dtype_option(arguments->dtype),
                                 device_option(arguments->device),
                                 threads_option(arguments->threads)};
  for (const Option& option : evaluation_options(*arguments)) {
    if (option.name != "--data") options.push_back(option);
  }
  return {.name = "analyze",
          .summary = "show what recipes cost a saved model, without training it",
          .example =
              "mantissa analyze runs/quickstart --recipes mxfp8,mxfp4_qat\n"
              "mantissa analyze runs/quickstart --data README.md --iters 4 --budget 6 --output rules.json",
          .options = options,
          .run = [arguments] {
            add_precision_files(arguments->precision_files, arguments->precision);
            return run_analyze(*arguments);
          }};
}

}  // namespace mantissa::tools
