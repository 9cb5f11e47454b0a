#include "metrics/run_metrics.h"

#include <limits>

#include "base/file.h"
#include "json/json_fields.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

void take(RunMetrics& run, const JsonReader& line) {
  const auto type = line.at("type").as<std::string>();
  if (type == "start") {  // a start at step s continues from a checkpoint of that step: what came after it is done again
    run.start = line.as<StartEvent>();
    run.starts.push_back(run.start.step);
    const auto forget = [&run](auto& entries) {
      std::erase_if(entries, [&run](const auto& entry) { return entry.step > run.start.step; });
    };
    for (Series* series : {&run.loss, &run.valid_loss, &run.valid_kl, &run.lr, &run.gradient_norm, &run.tokens_per_second,
                           &run.milliseconds, &run.imbalance})
      forget(*series);
    forget(run.precision);
    forget(run.routing);
    forget(run.samples);
  }
  if (type == "step") {
    const auto event = line.as<StepEvent>();
    // Without a loss, a step that was skipped had one that is not finite, and any other had no target.
    if (event.loss || event.skipped) run.loss.push_back({event.step, event.loss.value_or(std::numeric_limits<double>::quiet_NaN())});
    run.lr.push_back({event.step, event.lr});
    run.gradient_norm.push_back({event.step, event.gradient_norm});
    run.tokens_per_second.push_back({event.step, event.tokens_per_second});
    run.milliseconds.push_back({event.step, event.milliseconds});
    run.tokens = event.tokens;
    std::vector<LayerRouting> layers;
    if (line.value().contains("moe")) {
      for (const JsonReader& layer : line.at("moe").entries()) layers.push_back(layer.as<LayerRouting>());
    }
    if (!layers.empty()) {
      run.imbalance.push_back({event.step, most_uneven(layers).imbalance});
      std::erase_if(run.routing, [&](const RoutingPoint& point) { return point.step <= event.step - kRoutingSteps; });
      run.routing.push_back({event.step, std::move(layers)});
    }
  }
  if (type == "eval") {
    const auto event = line.as<EvaluationEvent>();
    run.valid_loss.push_back({event.step, event.result.loss});
    if (line.value().contains("kl")) run.valid_kl.push_back({event.step, line.at("kl").as<double>()});
  }
  if (type == "precision") {
    PrecisionEvent& event = run.precision.emplace_back(line.as<PrecisionEvent>());
    if (line.value().contains("worst_expert")) event.worst_expert = line.at("worst_expert").as<WorstExpert>();
  }
  if (type == "sample") run.samples.push_back(line.as<SampleEvent>());
}

std::string content_of(const fs::path& path) { return File::open_input(path).content(std::numeric_limits<int64_t>::max()); }

}  // namespace

RunMetrics read_run_metrics(const fs::path& folder) {
  const fs::path path = folder / "metrics.jsonl";
  std::error_code ignored;
  require(fs::is_directory(folder, ignored), ExitCode::usage, folder.string(), ": no run folder of that name");
  require(fs::is_regular_file(path, ignored), ExitCode::usage, folder.string(), ": not a run folder, it has no metrics.jsonl");
  RunMetrics run;
  const fs::path whole = fs::weakly_canonical(folder, ignored);  // "runs/a/" and "." have names, too
  run.name = from_json<std::string>(json_text(whole.filename().string()), folder.string());
  const std::string content = content_of(path);
  size_t number = 0;
  for (size_t begin = 0, end; (end = content.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string where = text(path.string(), ":", ++number);
    const Json line = parse_json_line(std::string_view(content).substr(begin, end - begin), where);
    take(run, JsonReader(line, where));
  }
  if (fs::is_regular_file(folder / "config.json", ignored)) run.config = content_of(folder / "config.json");
  return run;
}

}  // namespace mantissa
