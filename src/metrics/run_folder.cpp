#include "mantissa/metrics/run_folder.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <fstream>

#include "mantissa/base/host_name.h"
#include "mantissa/base/pending_file.h"
#include "mantissa/base/version.h"
#include "mantissa/checkpoint/checkpoint_search.h"
#include "mantissa/io/folder_lock.h"
#include "mantissa/json/json_fields.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

double unix_time() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

// Returns true if a run got as far as its first step: one that died before has left a line that it started, or a piece of it, and nothing
// to keep.
bool holds_metrics(const fs::path& folder) {
  constexpr std::string_view kStart = R"({"type":"start",)";
  std::ifstream lines(folder / "metrics.jsonl", std::ios::binary);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(kStart) && !kStart.starts_with(line)) return true;
  }
  return false;
}

bool holds_checkpoints(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_directory(folder, ignored) && !list_checkpoints(folder).empty();
}

// Returns "again-2" for "again", "again-3" where that is taken.
std::string free_name(const fs::path& folder) {
  std::string base = folder.filename().string();
  const size_t digits = base.find_last_not_of("0123456789") + 1;
  if (digits > 1 && digits < base.size() && base[digits - 1] == '-') base.resize(digits - 1);
  std::error_code ignored;
  for (int number = 2;; ++number) {
    const std::string name = text(base, '-', number);
    if (!fs::exists(folder.parent_path() / name, ignored)) return name;
  }
}

// Returns settings that start another run. Folders that are given do not follow the run's name.
std::string other_folder(const LoadedConfig& loaded, bool folder_used) {
  const fs::path folder = loaded.config.logging.dir;
  const bool checkpoints_given = loaded.report.given("checkpoint.dir");
  if (!loaded.report.given("logging.dir") && !checkpoints_given) return "--set logging.run_name=" + free_name(folder);
  const std::string checkpoints = "--set checkpoint.dir=%d/checkpoints";
  if (!folder_used) return checkpoints;
  return text("--set logging.dir=", (folder.parent_path() / free_name(folder)).string(), checkpoints_given ? ' ' + checkpoints : "");
}

void require_no_run(const LoadedConfig& loaded, bool metrics) {
  const fs::path folder = loaded.config.logging.dir, checkpoints = loaded.config.checkpoint.dir;
  const bool saved = holds_checkpoints(checkpoints), folder_used = metrics || (saved && checkpoints.parent_path() == folder);
  require(!metrics && !saved, ExitCode::usage, (folder_used ? folder : checkpoints).string(),
          ": holds metrics or checkpoints of an earlier run; continue it with --resume, or start another with ",
          other_folder(loaded, folder_used));
}

// A line of metrics.jsonl.
template <class Event>
struct Line {
  std::string type;
  Event event;
  double time;

  void fields(auto& v) {
    v("type", type);
    event.fields(v);
    v("time", time);
    if constexpr (requires { event.last_fields(v); }) event.last_fields(v);
  }
};

template <class Event>
void append(std::optional<AppendFile>& lines, const char* type, const Event& event, double time = unix_time()) {
  if (lines) lines->append(json_text(Line<Event>{type, event, time}) + "\n");
}

void write_descriptions(const LoadedConfig& loaded, const std::vector<std::string>& arguments, const fs::path& folder) {
  std::error_code error;
  write_file_atomically(folder / "config.json", effective_config(loaded.config));
  write_file_atomically(folder / "config-origins.json", effective_config(loaded.config, &loaded.report));
  const Json run = {{"arguments", arguments},
                    {"version", version()},
                    {"git_revision", git_revision()},
                    {"build", build_fingerprint()},
                    {"host", host_name()},
                    {"pid", getpid()},
                    {"directory", fs::current_path(error).string()},
                    {"started", unix_time()}};
  write_file_atomically(folder / "run.json", run.dump(2, Json::Order::keys) + "\n");
}

void add_routing_values(const std::vector<LayerRouting>& routing, std::vector<TaggedValue>& values) {
  const LayerRouting& worst = most_uneven(routing);
  values.push_back({"moe/imbalance", static_cast<float>(worst.imbalance)});
  if (worst.balance_loss) values.push_back({"moe/balance_loss", static_cast<float>(*worst.balance_loss)});
  if (worst.z_loss) values.push_back({"moe/z_loss", static_cast<float>(*worst.z_loss)});
  values.push_back({"moe/dropped", static_cast<float>(mean_dropped(routing))});
}

}  // namespace

void require_no_checkpoints(const LoadedConfig& loaded) { require_no_run(loaded, false); }

void require_unused_folder(const LoadedConfig& loaded) { require_no_run(loaded, holds_metrics(loaded.config.logging.dir)); }

void require_nobody_trains(const RunConfig& config) {
  std::error_code ignored;
  if (fs::is_directory(config.checkpoint.dir, ignored)) require_unlocked(config.checkpoint.dir);
}

void write_run_folder(const LoadedConfig& loaded, const std::vector<std::string>& arguments) {
  const fs::path folder = loaded.config.logging.dir;
  make_folders(folder);
  try {
    write_descriptions(loaded, arguments, folder);
  } catch (const Error& failure) {  // nothing is lost yet: code 7 is for a save that is
    if (failure.code() != ExitCode::storage) throw;
    fail(ExitCode::environment, failure.what());
  }
}

Metrics::Metrics(const LoggingConfig& config) {
  if (config.jsonl) {
    lines_.emplace(fs::path(config.dir) / "metrics.jsonl");
    lines_->cut_torn_line();
  }
  if (config.tensorboard) events_.emplace(config.dir, unix_time());
}

int64_t Metrics::dropped() const { return (lines_ ? lines_->failures() : 0) + (events_ ? events_->failures() : 0); }

void Metrics::write(const StartEvent& event) { append(lines_, "start", event); }

void Metrics::write(const StepEvent& event) {
  const double now = unix_time();
  append(lines_, "step", event, now);
  if (!events_) return;
  std::vector<TaggedValue> values;
  if (event.loss) values.push_back({"train/loss", static_cast<float>(*event.loss)});
  values.insert(values.end(), {{"train/grad_norm", static_cast<float>(event.gradient_norm)},
                               {"train/lr", static_cast<float>(event.lr)},
                               {"perf/tokens_per_sec", static_cast<float>(event.tokens_per_second)},
                               {"mem/peak_gib", static_cast<float>(event.memory_gib)}});
  if (event.padding > 0.0) values.push_back({"data/padding", static_cast<float>(event.padding)});
  if (event.gpu_memory_gib) values.push_back({"mem/gpu_peak_gib", static_cast<float>(*event.gpu_memory_gib)});
  if (!event.routing.empty()) add_routing_values(event.routing, values);
  if (event.mfu) values.push_back({"perf/mfu", static_cast<float>(*event.mfu)});
  if (event.mfu_measured) values.push_back({"perf/mfu_meas", static_cast<float>(*event.mfu_measured)});
  events_->write(event.step, now, values);
}

void Metrics::write(const EvaluationEvent& event) {
  const double now = unix_time();
  append(lines_, "eval", event, now);
  if (!events_) return;
  const std::array<TaggedValue, 1> values = {{{"valid/loss", static_cast<float>(event.result.loss)}}};
  events_->write(event.step, now, values);
}

void Metrics::write(const SampleEvent& event) { append(lines_, "sample", event); }

void Metrics::write(const StragglerEvent& event) { append(lines_, "straggler", event, unix_time()); }

void Metrics::write(const PrecisionEvent& event) {
  const double now = unix_time();
  append(lines_, "precision", event, now);
  if (!events_) return;
  const std::string tag = "precision/" + event.module + "/" + event.role + "/";
  const std::string amax = tag + "amax", sqnr = tag + "sqnr_db", clipped = tag + "clipped", flushed = tag + "flushed",
                    worst = tag + "worst_expert_sqnr_db";
  std::vector<TaggedValue> values = {{clipped, static_cast<float>(event.clipped)}, {flushed, static_cast<float>(event.flushed)}};
  if (event.amax) values.push_back({amax, static_cast<float>(*event.amax)});
  if (event.sqnr_db) values.push_back({sqnr, static_cast<float>(*event.sqnr_db)});
  if (event.worst_expert) values.push_back({worst, static_cast<float>(event.worst_expert->sqnr_db)});
  events_->write(event.step, now, values);
  const std::map<int, int64_t> exponents = event.scale_exponents();
  if (!exponents.empty()) events_->write_histogram(event.step, now, tag + "scale_exponent", exponents);
}

void Metrics::write(const SaveEvent& event) { append(lines_, "checkpoint", event); }
void Metrics::write(const ExportEvent& event) { append(lines_, "export", event); }

}  // namespace mantissa
