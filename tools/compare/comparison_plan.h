// The runs of `mantissa compare`, as its arguments ask for them. Nothing is written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/train/load_config.h"
#include "train/run_comparison.h"

namespace mantissa::tools {

struct CompareArguments {
  ConfigSources sources;
  std::string recipes;
  std::optional<std::string> match, output;
  int64_t seeds = 5;
  int jobs = 1;
  bool keep_checkpoints = false, json = false;
};

// One of --recipes: a name for precision.recipe, or a file that is merged over the configuration and is called as that.
struct ComparedRecipe {
  std::string name, file;
};

// A run of the comparison, or the first step of one.
struct PlannedRun {
  std::string name;
  ConfigSources sources;
  LoadedConfig loaded;
  RunInputs inputs = {};
};

// A key whose values differ; "absent": one configuration has no such entry.
struct SettingDifference {
  std::string key, one, other;
};

// Returns the differences of two contents of config.json, by key.
std::vector<SettingDifference> setting_differences(const Json& one, const Json& other);

class ComparisonPlan {
 public:
  // Throws Error(usage) for what is wrong with the arguments, and what the loader of the configuration throws; then the recipe is named.
  explicit ComparisonPlan(const CompareArguments& arguments);

  const std::filesystem::path& folder() const { return folder_; }
  const std::vector<ComparedRecipe>& recipes() const { return recipes_; }
  const std::vector<PlannedRun>& runs() const { return runs_; }  // by seed, then by recipe
  const RunConfig& config() const { return config_; }
  int threads() const { return threads_; }

  // Returns a run for first_gradients(), which makes no folder.
  PlannedRun first_step(size_t recipe) const;

 private:
  struct Settings {
    std::string name;
    int64_t seed = 1;
    std::string resume = "auto";
    int threads = 0;
  };
  PlannedRun planned(const ComparedRecipe& recipe, const Settings& settings) const;

  const CompareArguments& arguments_;
  std::vector<ComparedRecipe> recipes_;
  RunConfig config_;
  int threads_ = 1;
  std::filesystem::path folder_;
  std::vector<PlannedRun> runs_;
};

}  // namespace mantissa::tools
