#include "mantissa/train/run_folder.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <nlohmann/json.hpp>

#include "io/host_name.h"
#include "mantissa/base/json_fields.h"
#include "mantissa/base/pending_file.h"
#include "mantissa/base/version.h"
#include "mantissa/io/checkpoint_search.h"
#include "mantissa/io/folder_lock.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

double unix_time() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

bool holds_metrics(const fs::path& file) {
  std::error_code missing;
  const auto size = fs::file_size(file, missing);
  return !missing && size > 0;
}

bool holds_checkpoints(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_directory(folder, ignored) && !list_checkpoints(folder).empty();
}

void require_no_run(const RunConfig& config, bool used) {
  require(!used, ExitCode::usage, config.logging.dir,
          ": holds metrics or checkpoints of an earlier run; continue it with --resume, or start another with --set logging.run_name=",
          *config.logging.run_name, "-2");
}

// A line of metrics.jsonl.
template <class Report>
struct Line {
  std::string type;
  Report report;
  double time;

  void fields(auto& v) {
    v("type", type);
    report.fields(v);
    v("time", time);
    if constexpr (requires { report.last_fields(v); }) report.last_fields(v);
  }
};

template <class Report>
void append(std::optional<AppendFile>& lines, const char* type, const Report& report, double time = unix_time()) {
  if (lines) lines->append(json_text(Line<Report>{type, report, time}) + "\n");
}

void write_descriptions(const LoadedConfig& loaded, const std::vector<std::string>& arguments, const fs::path& folder) {
  std::error_code error;
  write_file_atomically(folder / "config.json", effective_config(loaded.config));
  write_file_atomically(folder / "config-origins.json", effective_config(loaded.config, &loaded.report));
  const nlohmann::ordered_json run = {{"arguments", arguments},
                                      {"version", version()},
                                      {"git_revision", git_revision()},
                                      {"build", build_fingerprint()},
                                      {"host", host_name()},
                                      {"pid", getpid()},
                                      {"directory", fs::current_path(error).string()},
                                      {"started", unix_time()}};
  write_file_atomically(folder / "run.json", run.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace

void require_no_checkpoints(const RunConfig& config) { require_no_run(config, holds_checkpoints(config.checkpoint.dir)); }

void require_unused_folder(const RunConfig& config) {
  require_no_run(config, holds_metrics(fs::path(config.logging.dir) / "metrics.jsonl") || holds_checkpoints(config.checkpoint.dir));
}

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

void Metrics::write(const StartReport& report) { append(lines_, "start", report); }

void Metrics::write(const StepReport& report) {
  const double now = unix_time();
  append(lines_, "step", report, now);
  if (!events_) return;
  std::vector<TaggedValue> values = {{"train/loss", static_cast<float>(report.loss)},
                                     {"train/grad_norm", static_cast<float>(report.gradient_norm)},
                                     {"train/lr", static_cast<float>(report.lr)},
                                     {"perf/tokens_per_sec", static_cast<float>(report.tokens_per_second)},
                                     {"mem/peak_gib", static_cast<float>(report.memory_gib)}};
  if (report.mfu) values.push_back({"perf/mfu", static_cast<float>(*report.mfu)});
  events_->write(report.step, now, values);
}

void Metrics::write(const EvaluationReport& report) {
  const double now = unix_time();
  append(lines_, "eval", report, now);
  if (!events_) return;
  const std::array<TaggedValue, 1> values = {{{"valid/loss", static_cast<float>(report.result.loss)}}};
  events_->write(report.step, now, values);
}

void Metrics::write(const SampleReport& report) { append(lines_, "sample", report); }

void Metrics::write(const PrecisionReport& report) {
  const double now = unix_time();
  append(lines_, "precision", report, now);
  if (!events_) return;
  const std::string tag = "precision/" + report.module + "/" + report.role + "/";
  const std::string amax = tag + "amax", sqnr = tag + "sqnr_db", clipped = tag + "clipped", flushed = tag + "flushed";
  std::vector<TaggedValue> values = {{clipped, static_cast<float>(report.clipped)}, {flushed, static_cast<float>(report.flushed)}};
  if (report.amax) values.push_back({amax, static_cast<float>(*report.amax)});
  if (report.sqnr_db) values.push_back({sqnr, static_cast<float>(*report.sqnr_db)});
  events_->write(report.step, now, values);
  const std::map<int, int64_t> exponents = report.scale_exponents();
  if (!exponents.empty()) events_->write_histogram(report.step, now, tag + "scale_exponent", exponents);
}

void Metrics::write(const SaveReport& report) { append(lines_, "checkpoint", report); }

}  // namespace mantissa
