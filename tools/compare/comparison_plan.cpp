#include "tools/compare/comparison_plan.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>

#include "base/file.h"
#include "base/parallel.h"
#include "json/json_fields.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"
#include "mantissa/train/train.h"
#include "tools/command.h"

namespace mantissa::tools {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostSeeds = 10'000;
constexpr int64_t kLargestRecipe = 16 << 20;  // bytes

// Returns whether the key is this one or lies below it.
bool is_in(const std::string& key, const std::string& other) { return key == other || key.starts_with(other + "."); }

// Returns the keys to which an argument of --set gives values.
std::vector<std::string> keys_of(const std::string& set) {
  const size_t equals = std::min(set.find('='), set.size());
  const Json value = parse_json_or_null(std::string_view(set).substr(std::min(equals + 1, set.size())));
  std::vector<std::string> keys;
  for (const auto& [key, leaf] : leaves_of(value)) keys.push_back(set.substr(0, equals) + (key.empty() ? "" : ".") + key);
  return keys;
}

std::string without_blanks(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

std::vector<ComparedRecipe> recipes_of(const CompareArguments& arguments) {
  std::vector<ComparedRecipe> out;
  std::set<std::string> names;
  for (const std::string& part : split(arguments.recipes, ',')) {
    const std::string item = without_blanks(part);
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

// A key that compare sets for its runs.
struct OwnKey {
  const char* name;
  const char* how = "for each run by --recipes, --seeds and --output";
  bool of_recipes = false;  // the configuration may give it, a recipe may not
};

const OwnKey* own_key(const std::string& key) {
  static constexpr std::array kOwn{
      OwnKey{"training.seed"},
      OwnKey{"precision.recipe"},
      OwnKey{"logging.dir"},
      OwnKey{"logging.run_name"},
      OwnKey{"logging.jsonl"},
      OwnKey{"logging.console"},
      OwnKey{"logging.interval", "to 1, since a median needs the time of every step"},
      OwnKey{"checkpoint.dir"},
      OwnKey{"checkpoint.resume"},
      OwnKey{"checkpoint.export", "to null: a comparison exports nothing", true},
      OwnKey{"training.threads", "for all runs alike: give it in the configuration", true},
  };
  const auto found = std::ranges::find_if(kOwn, [&](const OwnKey& own) { return is_in(key, own.name); });
  return found == kOwn.end() ? nullptr : &*found;
}

void check(const CompareArguments& arguments) {
  require(arguments.seeds >= 1 && arguments.seeds <= kMostSeeds, ExitCode::usage, "--seeds: must be 1 to ", kMostSeeds, ", got ",
          arguments.seeds);
  require(arguments.jobs >= 1 && arguments.jobs <= num_threads(), ExitCode::usage, "--jobs: must be 1 to ", num_threads(),
          ", the cores that this process may use, got ", arguments.jobs);
  for (const std::string& set : arguments.sources.sets) {
    for (const std::string& key : keys_of(set)) {
      const OwnKey* const own = own_key(key);
      if (own == nullptr || own->of_recipes || (arguments.match && key == "precision.recipe")) continue;
      fail(ExitCode::usage, "--set ", own->name, ": compare sets it ", own->how);
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

// Throws Error(usage) for keys of a recipe that would be without effect: those that compare sets, and those that --set gives to all runs,
// which counts after files. The file has been read before.
void require_effect(const ComparedRecipe& recipe, const CompareArguments& arguments) {
  const ParsedJson file = parse_commented_json(File::open_input(recipe.file).content(kLargestRecipe));
  for (const auto& [key, leaf] : leaves_of(file.root)) {
    const OwnKey* const own = own_key(key);
    require(own == nullptr || key == "precision.recipe", ExitCode::usage, "with the recipe ", printable(recipe.name), ": ", printable(key),
            ": compare sets it ", own == nullptr ? "" : own->how, "; take it out of ", printable(recipe.file));
    for (const std::string& set : arguments.sources.sets) {
      const std::string given = set.substr(0, set.find('='));
      require(!is_in(key, given) && !is_in(given, key), ExitCode::usage, "with the recipe ", printable(recipe.name), ": ", printable(key),
              ": --set ", printable(given), " would replace it in all runs: give that by --set-file or in the configuration");
    }
  }
}

Json json_of(const RunConfig& config) { return parse_json(effective_config(config), "the configuration"); }

// Returns by how many windows each validation set is evaluated at most; none: by all that it has.
std::optional<int64_t> most_windows(const RunConfig& config) {
  return config.eval.iters ? std::optional(*config.eval.iters * config.training.micro_batch_size) : std::nullopt;
}

// Throws Error(usage) that lists the keys by which losses of a recipe would be of other tokens than those of the baseline.
void require_same_evaluation(const ComparedRecipe& recipe, const PlannedRun& run, const ComparedRecipe& first, const PlannedRun& baseline) {
  RunConfig own = run.loaded.config, other = baseline.loaded.config;
  if (own.model.vocab_size.has_value() != other.model.vocab_size.has_value()) {
    set_vocabulary(own);
    set_vocabulary(other);
  }
  const bool as_many = most_windows(own) == most_windows(other);
  const auto changes_tokens = [&](const std::string& key) {
    if (is_in(key, "eval.iters") || is_in(key, "training.micro_batch_size")) return !as_many;
    if (is_in(key, "data")) return !is_in(key, "data.train") && !is_in(key, "data.reset_position_ids") && !is_in(key, "data.document_mask");
    return is_in(key, "training.seq_len") || is_in(key, "model.vocab_size");
  };
  std::vector<std::string> found;
  for (const SettingDifference& each : setting_differences(json_of(own), json_of(other)))
    if (changes_tokens(each.key)) found.push_back(text(each.key, " is ", each.one, " and ", each.other, " with ", first.name));
  const auto tokenizer = [](const PlannedRun& of) { return of.inputs.contains("data.tokenizer") ? of.inputs.at("data.tokenizer") : ""; };
  if (found.empty() && tokenizer(run) != tokenizer(baseline)) found.push_back("data.tokenizer has other content than with " + first.name);
  require(found.empty(), ExitCode::usage, "with the recipe ", printable(recipe.name), ": its losses would not compare, since they are of ",
          "other tokens: ", printable(joined(found, "; ")), as_many ? "" : "; eval.iters null evaluates all of the validation data");
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

std::vector<SettingDifference> setting_differences(const Json& one, const Json& other) {
  const auto own = leaves_of(one), others = leaves_of(other);
  const auto found_in = [](const std::map<std::string, const Json*>& leaves, const std::string& key) {
    const auto found = leaves.find(key);
    return found == leaves.end() ? nullptr : found->second;
  };
  const auto shown = [](const Json* value) { return value == nullptr ? "absent" : value->shown(); };
  std::set<std::string> keys;
  for (const auto* const leaves : {&own, &others})
    for (const auto& [key, value] : *leaves) keys.insert(key);
  std::vector<SettingDifference> out;
  for (const std::string& key : keys) {
    const Json *const mine = found_in(own, key), *const theirs = found_in(others, key);
    if (mine == nullptr || theirs == nullptr || *mine != *theirs) out.push_back({.key = key, .one = shown(mine), .other = shown(theirs)});
  }
  return out;
}

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
      if (seed > 1) continue;
      if (!recipes_[r].file.empty()) require_effect(recipes_[r], arguments);
      require_same_evaluation(recipes_[r], run, recipes_.front(), runs_.front());
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
  sets.insert(sets.end(), {text("training.seed=", settings.seed), text("training.threads=", settings.threads),
                           "logging.run_name=" + settings.name, "logging.dir=" + folder, "logging.jsonl=true", "logging.console=plain",
                           "logging.interval=1", "checkpoint.dir=%d/checkpoints", "checkpoint.resume=" + settings.resume,
                           "checkpoint.export=null"});  // the baseline may not have the form that it names
  try {
    run.loaded = load_alone(run.sources);
  } catch (const Error& error) {
    fail(error.code(), "with the recipe ", printable(recipe.name), ": ", error.what());
  }
  return run;
}

}  // namespace mantissa::tools
