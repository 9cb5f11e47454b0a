#include "tools/compare/run_folders.h"

#include <algorithm>
#include <string>

#include "base/file.h"
#include "json/json_fields.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"

namespace mantissa::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kElsewhere = "; choose another --output, or delete the folder";

constexpr const char* kInputs = ".inputs.json";
fs::path inputs_file(const fs::path& run) { return run.string() + kInputs; }
fs::path state_file(const fs::path& run) { return run.string() + ".state.json"; }

}  // namespace

void require_same_run(const PlannedRun& run, const fs::path& folder) {
  std::error_code none;
  const fs::path file = folder / "config.json";
  if (!fs::exists(folder, none)) return;
  require(fs::is_regular_file(file, none), ExitCode::usage, folder.string(),
          ": is no folder of a run of this comparison; choose another --output");
  const Json there = parse_json(File::open_input(file).content(kLargestRunFile), file.string()),
             wanted = parse_json(effective_config(run.loaded.config), "the configuration");
  for (const auto& [key, here, was] : setting_differences(wanted, there)) {
    const bool of_data = key == "model.vocab_size" && !run.loaded.config.model.vocab_size;
    const bool is_free = key == "precision.rules" /* empty: its entries follow */ || key == "training.threads" ||
                         key == "logging.interval" || key == "logging.dir" || key == "checkpoint.dir";
    require(of_data || is_free, ExitCode::usage, folder.string(), ": is of another configuration: ", printable(key), " is ", printable(was),
            " there and ", printable(here), " here", key.starts_with("precision.rules") ? ", where --match gives a rule, too" : "",
            kElsewhere);
  }
}

void require_folder_of_comparison(const fs::path& folder) {
  std::error_code none;
  bool foreign = false;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, none)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(kInputs)) return;
    foreign = foreign || name != "LOCK";
  }
  require(!foreign, ExitCode::usage, folder.string(), ": is not empty, and no comparison made it; choose another --output");
}

std::optional<Measured> RunState::measured() const {
  const bool alike = !starts.empty() && std::ranges::all_of(starts, [&](const Measured& each) { return each == starts.front(); });
  return alike ? std::optional(starts.front()) : std::nullopt;
}

RunState read_state(const fs::path& run) {
  const fs::path file = state_file(run);
  std::error_code none;
  if (!fs::is_regular_file(file, none)) return {};
  return from_json<RunState>(File::open_input(file).content(kLargestRunFile), file.string());
}

void write_state(const fs::path& run, const RunState& state) { write_file_atomically(state_file(run), json_text(state) + "\n"); }

void write_inputs(const fs::path& run, const RunInputs& inputs) {
  Json json = Json::Members();
  for (const auto& [input, hash] : inputs) json.add(input, hash);
  write_file_atomically(inputs_file(run), json.dump(1) + "\n");
}

void require_same_inputs(const fs::path& run, const RunInputs& now) {
  const fs::path file = inputs_file(run);
  std::error_code none;
  require(fs::is_regular_file(file, none), ExitCode::usage, run.string(), ": there is no ", file.filename().string(),
          " beside it, which would say what it read", kElsewhere);
  const Json written = parse_json(File::open_input(file).content(kLargestRunFile), file.string());
  RunInputs then;
  for (const auto& [input, hash] : written.members()) then[input] = hash.string();
  RunInputs all = now;
  all.insert(then.begin(), then.end());
  for (const auto& [input, hash] : all) {
    const auto shown = [&](const RunInputs& inputs) { return inputs.contains(input) ? inputs.at(input) : "nothing"; };
    require(shown(then) == shown(now), ExitCode::usage, run.string(), ": did not read what there is now: ", printable(input), " was ",
            printable(shown(then)), " and is ", shown(now), kElsewhere);
  }
}

std::optional<RunMetrics> finished_metrics(const PlannedRun& run, const fs::path& folder) {
  std::error_code none;
  if (!fs::is_regular_file(folder / "metrics.jsonl", none)) return {};
  RunMetrics metrics = read_run_metrics(folder);
  const bool evaluated = !metrics.valid_loss.empty() && metrics.valid_loss.back().step == run.loaded.config.training.steps;
  return evaluated ? std::optional(std::move(metrics)) : std::nullopt;
}

}  // namespace mantissa::tools
