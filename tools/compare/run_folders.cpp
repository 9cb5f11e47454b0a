#include "tools/compare/run_folders.h"

#include <map>
#include <set>

#include "base/file.h"
#include "json/json_fields.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"

namespace mantissa::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kElsewhere = "; choose another --output, or delete the folder";

fs::path inputs_file(const fs::path& run) { return run.string() + ".inputs.json"; }

}  // namespace

void require_same_run(const PlannedRun& run, const fs::path& folder) {
  std::error_code none;
  const fs::path file = folder / "config.json";
  if (!fs::exists(folder, none)) return;
  require(fs::is_regular_file(file, none), ExitCode::usage, folder.string(),
          ": is no folder of a run of this comparison; choose another --output");
  const Json there = parse_json(File::open_input(file).content(kLargestRunFile), file.string()),
             wanted = parse_json(effective_config(run.loaded.config), "the configuration");
  const auto own = leaves_of(wanted), others = leaves_of(there);
  const auto shown = [](const std::map<std::string, const Json*>& leaves, const std::string& key) {
    const auto found = leaves.find(key);
    return found == leaves.end() ? "not there" : found->second->shown();
  };
  std::set<std::string> keys;
  for (const auto* const leaves : {&own, &others})
    for (const auto& [key, value] : *leaves) keys.insert(key);
  for (const std::string& key : keys) {
    const bool of_data = key == "model.vocab_size" && !run.loaded.config.model.vocab_size;
    if (of_data || key == "training.threads" || key == "logging.dir" || key == "checkpoint.dir") continue;
    const std::string here = shown(own, key), was = shown(others, key);
    require(here == was, ExitCode::usage, folder.string(), ": is of another configuration: ", printable(key), " is ", printable(was),
            " there and ", printable(here), " here", kElsewhere);
  }
}

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
