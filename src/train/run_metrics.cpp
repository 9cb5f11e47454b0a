#include "mantissa/train/run_metrics.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "mantissa/base/file.h"
#include "mantissa/base/json.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr uint64_t kLargestInteger = std::numeric_limits<int64_t>::max();

// One line of metrics; every access names file and line if the line has not what is asked for.
class Line {
 public:
  Line(std::string_view content, std::string where) : where_(std::move(where)), json_(parse_json_line(content, where_)) {
    require(json_.is_object(), ExitCode::data, where_, ": not an object");
  }

  std::string string(const char* key) const { return at(key, &json::is_string, "a string").get<std::string>(); }
  int64_t integer(const char* key) const {
    const json& value = at(key, &json::is_number_integer, "an integer");
    require(!value.is_number_unsigned() || value.get<uint64_t>() <= kLargestInteger, ExitCode::data, where_, ": \"", key,
            "\" must be below 2^63");
    return value.get<int64_t>();
  }
  std::optional<double> number(const char* key) const {  // none: null, as NaN and Inf are written
    if (json_.contains(key) && json_[key].is_null()) return {};
    return at(key, &json::is_number, "a number").get<double>();
  }
  double number_or_nan(const char* key) const { return number(key).value_or(std::numeric_limits<double>::quiet_NaN()); }
  const json& object(const char* key) const { return at(key, &json::is_object, "an object"); }
  const std::string& where() const { return where_; }

 private:
  const json& at(const char* key, bool (json::*is)() const noexcept, const char* expected) const {
    require(json_.contains(key) && (json_[key].*is)(), ExitCode::data, where_, ": \"", key, "\" must be ", expected);
    return json_[key];
  }

  std::string where_;
  json json_;
};

template <class Entry>
void forget_after(std::vector<Entry>& entries, int64_t step) {
  std::erase_if(entries, [step](const Entry& entry) { return entry.step > step; });
}

// A start at step s continues from a checkpoint of that step: what came after it is done again.
void take_start(RunMetrics& run, const Line& line) {
  run.start = {.folder = {},
               .resumed = line.string("resumed"),
               .step = line.integer("step"),
               .steps = line.integer("steps"),
               .parameters = line.integer("parameters"),
               .training_tokens = 0,
               .validation_sets = 0,
               .precision = line.string("precision"),
               .device = line.string("device"),
               .threads = static_cast<int>(line.integer("threads"))};
  for (Series* series : {&run.loss, &run.valid_loss, &run.lr, &run.gradient_norm, &run.tokens_per_second})
    forget_after(*series, run.start.step);
  forget_after(run.precision, run.start.step);
  forget_after(run.samples, run.start.step);
}

void take_step(RunMetrics& run, const Line& line) {
  const int64_t step = line.integer("step");
  run.loss.push_back({step, line.number_or_nan("loss")});
  run.lr.push_back({step, line.number_or_nan("lr")});
  run.gradient_norm.push_back({step, line.number_or_nan("grad_norm")});
  run.tokens_per_second.push_back({step, line.number_or_nan("tok_s")});
  run.tokens = line.integer("tokens");
}

void take_precision(RunMetrics& run, const Line& line) {
  PrecisionReport report{.step = line.integer("step"),
                         .module = line.string("module"),
                         .role = line.string("role"),
                         .sqnr_db = line.number("sqnr_db"),
                         .clipped = line.number_or_nan("clipped"),
                         .flushed = line.number_or_nan("flushed"),
                         .amax = line.number("amax"),
                         .scales = {}};
  for (const auto& [code, count] : line.object("scales").items()) {
    require(count.is_number_unsigned() && count.get<uint64_t>() <= kLargestInteger && !code.empty() && code.size() <= 3 &&
                code.find_first_not_of("0123456789") == std::string::npos,
            ExitCode::data, line.where(), ": \"scales\" must hold counts by scale code");
    report.scales[std::stoi(code)] = count.get<int64_t>();
  }
  run.precision.push_back(std::move(report));
}

void take(RunMetrics& run, const Line& line) {
  const std::string type = line.string("type");
  if (type == "start") take_start(run, line);
  if (type == "step") take_step(run, line);
  if (type == "eval") run.valid_loss.push_back({line.integer("step"), line.number_or_nan("loss")});
  if (type == "precision") take_precision(run, line);
  if (type == "sample") run.samples.push_back({line.integer("step"), line.string("prompt"), line.string("text")});
}

std::string content_of(const fs::path& path) { return File::open_input(path).content(std::numeric_limits<int64_t>::max()); }

// "runs/a/" and "." have names, too.
std::string name_of(const fs::path& folder) {
  std::error_code unknown;
  const fs::path path = fs::weakly_canonical(folder, unknown);
  const std::string bytes = path.filename().string();
  return json::parse(json(bytes).dump(-1, ' ', false, json::error_handler_t::replace)).get<std::string>();
}

}  // namespace

RunMetrics read_run_metrics(const fs::path& folder) {
  const fs::path path = folder / "metrics.jsonl";
  std::error_code ignored;
  require(fs::is_directory(folder, ignored), ExitCode::usage, folder.string(), ": no run folder of that name");
  require(fs::is_regular_file(path, ignored), ExitCode::usage, folder.string(), ": not a run folder, it has no metrics.jsonl");
  RunMetrics run;
  run.name = name_of(folder);
  const std::string content = content_of(path);
  size_t number = 0;
  for (size_t begin = 0, end; (end = content.find('\n', begin)) != std::string::npos; begin = end + 1)
    take(run, Line(std::string_view(content).substr(begin, end - begin), text(path.string(), ":", ++number)));
  if (fs::is_regular_file(folder / "config.json", ignored)) run.config = content_of(folder / "config.json");
  return run;
}

}  // namespace mantissa
