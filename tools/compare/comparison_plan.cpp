#include "tools/compare/comparison_plan.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "base/parallel.h"
#include "json/json_fields.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"
#include "mantissa/train/train.h"

namespace mantissa::tools {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostSeeds = 10'000;

std::vector<ComparedRecipe> recipes_of(const CompareArguments& arguments) {
  std::vector<ComparedRecipe> out;
  std::set<std::string> names;
  for (const std::string& item : split(arguments.recipes, ',')) {
    const bool is_file = item.ends_with(".json");
    const ComparedRecipe& recipe =
        out.emplace_back(ComparedRecipe{.name = is_file ? fs::path(item).stem().string() : item, .file = is_file ? item : ""});
    require(!item.empty(), ExitCode::usage, "--recipes: a name is missing in \"", printable(arguments.recipes), "\"");
    require(is_file || item.find('/') == std::string::npos, ExitCode::usage, "--recipes: '", printable(item),
            "' is no name of a recipe; a file ends with .json");
    require(!is_file || !arguments.match, ExitCode::usage, "--match gives recipes by name to modules, but ", printable(item),
            " is a file, which may have rules of its own");
    require(names.insert(recipe.name).second, ExitCode::usage, "--recipes: ", printable(recipe.name), " is there twice");
  }
  require(out.size() > 1, ExitCode::usage, "--recipes: needs the baseline and at least one recipe to compare with it, as in high,mxfp8");
  return out;
}

void check(const CompareArguments& arguments) {
  require(arguments.seeds >= 1 && arguments.seeds <= kMostSeeds, ExitCode::usage, "--seeds: must be 1 to ", kMostSeeds, ", got ",
          arguments.seeds);
  require(arguments.jobs >= 1 && arguments.jobs <= num_threads(), ExitCode::usage, "--jobs: must be 1 to ", num_threads(),
          ", the cores that this process may use, got ", arguments.jobs);
  for (const std::string& set : arguments.sources.sets) {
    const std::string key = set.substr(0, set.find('='));
    for (const char* const own : {"training.seed", "precision.recipe", "logging.dir", "logging.run_name", "logging.jsonl",
                                  "logging.console", "checkpoint.dir", "checkpoint.resume"}) {
      const bool differs = key == own && !(arguments.match && key == "precision.recipe");
      require(!differs, ExitCode::usage, "--set ", key, ": compare sets it for each run by --recipes, --seeds and --output");
    }
  }
}

// Loads the configuration of a run of one process, which each run of a comparison is. What is wrong otherwise is told by the loader.
LoadedConfig load_alone(const ConfigSources& sources) {
  RunConfig given;
  ConfigReport report;
  const bool known = read_config(sources, fields_of(given), report) && !report.failed("parallel");
  const auto& [data, tensor, expert] = std::tie(given.parallel.data, given.parallel.tensor, given.parallel.expert);
  require(!known || (data <= 1 && tensor == 1 && expert == 1), ExitCode::usage, "parallel asks for several ranks (data ", data, ", tensor ",
          tensor, ", expert ", expert, "), but compare trains each run as one process: set these keys to 1");
  LoadedConfig loaded = load_run_config(sources, Inputs::must_exist, 1);
  if (loaded.config.training.epochs) resolve_by_data(loaded);
  return loaded;
}

// The configuration as it is given, without what compare sets.
RunConfig given_config(const CompareArguments& arguments) {
  const RunConfig config = load_alone(arguments.sources).config;
  require(!config.checkpoint.resumes_named(), ExitCode::usage, "checkpoint.resume names ", config.checkpoint.resume,
          ", but the runs of a comparison are new; checkpoint.init_from starts them from the weights of a model");
  require(config.data.has_validation(), ExitCode::usage,
          "there is no validation data to compare losses on: give data.valid, or data.valid_fraction");
  return config;
}

}  // namespace

ComparisonPlan::ComparisonPlan(const CompareArguments& arguments) : arguments_(arguments), recipes_(recipes_of(arguments)) {
  check(arguments);
  config_ = given_config(arguments);
  const int own = config_.training.threads;
  threads_ = own > 0 ? own : std::max(1, num_threads() / arguments.jobs);
  folder_ = arguments.output.value_or("runs/compare-" + fs::path(arguments.sources.file).stem().string());
  for (int64_t seed = 1; seed <= arguments.seeds; ++seed) {  // pairs are complete as early as may be
    for (size_t r = 0; r < recipes_.size(); ++r) {
      const std::string& recipe = recipes_[r].name;
      PlannedRun& run = runs_.emplace_back(planned(recipes_[r], {.name = text(recipe, "-seed", seed), .seed = seed, .threads = threads_}));
      run.inputs = seed == 1 ? run_inputs(run.loaded) : runs_[r].inputs;
    }
  }
}

PlannedRun ComparisonPlan::first_step(size_t recipe) const {
  return planned(recipes_[recipe], {.name = "first-step", .resume = "never", .threads = config_.training.threads});
}

PlannedRun ComparisonPlan::planned(const ComparedRecipe& recipe, const Settings& settings) const {
  PlannedRun run{.name = settings.name, .sources = arguments_.sources, .loaded = {}};
  if (!recipe.file.empty()) run.sources.set_files.push_back(recipe.file);
  std::vector<std::string>& sets = run.sources.sets;
  if (arguments_.match) {
    std::vector<RuleConfig> rules = config_.precision.rules;
    rules.insert(rules.begin(), RuleConfig{.match = *arguments_.match, .recipe = recipe.name});
    sets.push_back("precision.rules=" + json_text(rules));
  } else if (recipe.file.empty()) {
    sets.push_back("precision.recipe=" + recipe.name);
  }
  std::string folder;  // logging.dir replaces %
  for (const char c : (folder_ / settings.name).string()) folder += c == '%' ? std::string("%%") : std::string(1, c);
  sets.insert(sets.end(),
              {text("training.seed=", settings.seed), text("training.threads=", settings.threads), "logging.run_name=" + settings.name,
               "logging.dir=" + folder, "logging.jsonl=true", "logging.console=plain", "checkpoint.dir=%d/checkpoints",
               "checkpoint.resume=" + settings.resume, "checkpoint.export=null"});  // the baseline may not have the form that it names
  try {
    run.loaded = load_alone(run.sources);
  } catch (const Error& error) {
    fail(error.code(), "with the recipe ", printable(recipe.name), ": ", error.what());
  }
  return run;
}

}  // namespace mantissa::tools
