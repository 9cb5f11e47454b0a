// The folder of a run, runs/<name>/: config.json (resolved), config-origins.json (the same, each value followed by a comment that names its
// origin), run.json, metrics.jsonl, TensorBoard events, log.txt; the checkpoints lie in checkpoint.dir, by default inside.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mantissa/config/run_config.h"
#include "mantissa/metrics/append_file.h"
#include "mantissa/metrics/event_file.h"
#include "mantissa/metrics/events.h"

namespace mantissa {

// Throw Error(usage) if the folder holds checkpoints of an earlier run; the second, too, if it holds metrics of its steps. They change
// nothing.
void require_no_checkpoints(const LoadedConfig& loaded);
void require_unused_folder(const LoadedConfig& loaded);

// Throws Error(environment) if another process trains there.
void require_nobody_trains(const RunConfig& config);

// Makes the folder and writes config.json, config-origins.json and run.json. `arguments` is the command line, for run.json.
// Throws Error(environment) if that is not possible, Error(usage) if the path cannot be a folder.
void write_run_folder(const LoadedConfig& loaded, const std::vector<std::string>& arguments);

// Writes metrics.jsonl and the event file. A full disk drops lines and counts them; training goes on.
class Metrics {
 public:
  explicit Metrics(const LoggingConfig& config);
  void write(const StartEvent& event);
  void write(const StepEvent& event);
  void write(const EvaluationEvent& event);
  void write(const SampleEvent& event);
  void write(const SaveEvent& event);
  void write(const ExportEvent& event);
  void write(const PrecisionEvent& event);
  void write(const StragglerEvent& event);
  int64_t dropped() const;

 private:
  std::optional<AppendFile> lines_;  // one JSON object each
  std::optional<EventFile> events_;
};

}  // namespace mantissa
