#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "data/documents.h"
#include "json/json_fields.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"
#include "metrics/run_trace.h"
#include "tools/trace/step_shares.h"

namespace mantissa::tools {
namespace {

namespace fs = std::filesystem;

// Events as they stand in the file.
struct SpanEvent {
  struct Arguments {
    int64_t number = -1, bytes = 0;
    double flops = 0.0;
    void fields(auto& v) {
      v("number", number, "", limits::later);
      v("bytes", bytes, "", Limits{.min = 0, .later = true});
      v("flops", flops, "", Limits{.min = 0, .later = true});
    }
  };
  std::string name, cat;
  double ts = 0.0, dur = 0.0;
  int pid = 0, tid = 0;
  void fields(auto& v) {
    v("name", name);
    v("cat", cat);
    v("ts", ts, "", limits::not_negative);
    v("dur", dur, "", limits::not_negative);
    v("pid", pid, "", limits::not_negative);
    v("tid", tid, "", limits::not_negative);
  }
};

struct AboutTrace {
  int version = 0, ranks = 0;
  int64_t first = 0, last = 0, attempt = 0;
  std::string device;
  void fields(auto& v) {
    v("version", version);
    v("ranks", ranks, "", limits::positive);
    v("first", first, "", limits::positive);
    v("last", last, "", limits::positive);
    v("attempt", attempt, "", limits::later);
    v("device", device);
  }
};

// Takes the lines of a file. A part may lack its end, and its last line may be torn.
class LineTaker {
 public:
  LineTaker(std::string file, ReadTrace& into) : file_(std::move(file)), into_(into) {}

  void take(std::string_view line, int64_t number) {
    if (held_) take_whole(*held_);
    held_ = std::string(line);
    number_ = number;
  }
  // Returns true if the file has its end. torn: its last line has none.
  bool finish(bool torn) {
    if (held_ && *held_ == "]") {
      check(number_ > 1 && !open(), "the trace ends before its last rank has");
      return true;
    }
    if (held_ && !torn) take_whole(*held_);
    return false;
  }

 private:
  bool open() const { return current_ && !current_->ended; }
  template <class... Parts>
  void check(bool ok, const Parts&... parts) const {
    require(ok, ExitCode::data, file_, ":", number_, ": ", parts...);
  }

  void take_whole(std::string_view line) {
    if (number_ == 1) return check(line == "[", "this is no trace: it must begin with a line that is [");
    if (line.ends_with(',')) line.remove_suffix(1);
    const std::string where = text(file_, ":", number_);
    const Json event = parse_json_line(line, where);
    const JsonReader reader(event, where);
    reader.require(event.is_object() && event.contains("ph"), "must be an event with ph, got ", event.shown());
    const std::string phase = reader.at("ph").as<std::string>();
    if (phase == "X") return take_span(reader);
    reader.require(phase == "M", "ph: must be X or M, got ", phase);
    take_metadata(reader);
  }

  void take_metadata(const JsonReader& reader) {
    const std::string name = reader.at("name").as<std::string>();
    const int rank = reader.at("pid").as<int>();
    if (name == "mantissa") {
      const auto about = reader.at("args").as<AboutTrace>();
      reader.require(about.version == kTraceVersion, "version: must be ", kTraceVersion, ", got ", about.version);
      reader.require(!open(), "rank ", rank, " begins before the one before has ended");
      reader.require(into_.ranks == 0 || into_.ranks == about.ranks, "ranks: got ", about.ranks, ", and ", into_.ranks, " before");
      reader.require(rank >= 0 && rank < about.ranks, "pid: must be a rank below ", about.ranks, ", got ", rank);
      if (!into_.parts.empty()) {
        reader.require(into_.first == about.first && into_.last == about.last, "rank ", rank, " traces steps ", about.first, " to ",
                       about.last, ", but rank ", into_.parts.back().rank, " in ", into_.parts.back().file, ' ', into_.first, " to ",
                       into_.last, ": they are of different runs; remove the older file");
        reader.require(into_.attempt == about.attempt, "rank ", rank, " was traced by ",
                       about.attempt < into_.attempt ? "an earlier" : "a later", " attempt of the run than rank ", into_.parts.back().rank,
                       " in ", into_.parts.back().file, "; remove the older file");
      }
      into_.ranks = about.ranks, into_.first = about.first, into_.last = about.last, into_.attempt = about.attempt;
      const bool twice = std::ranges::any_of(into_.parts, [&](const RankTrace& part) { return part.rank == rank; });
      reader.require(!twice, "rank ", rank, " begins a second time");
      current_ = &into_.parts.emplace_back(RankTrace{.rank = rank, .file = file_, .device = about.device});
      return;
    }
    reader.require(open(), name, " must follow the event mantissa of its rank");
    reader.require(rank == current_->rank, "pid: must be ", current_->rank, ", got ", rank);
    if (name != "end") return;
    const auto spans = reader.at("args").at("spans").as<int64_t>();
    reader.require(spans == std::ssize(current_->spans), "rank ", rank, " had ", spans, " spans, of which ", current_->spans.size(),
                   " are here");
    current_->ended = true;
  }

  void take_span(const JsonReader& reader) {
    const auto event = reader.as<SpanEvent>();
    reader.require(open() && event.pid == current_->rank, "pid: rank ", event.pid, " has not begun, or has ended");
    const auto* const track = std::ranges::find(kTrackNames, event.cat);
    reader.require(track != kTrackNames.end(), "cat: must be one of ",
                   joined(std::vector<std::string>(kTrackNames.begin(), kTrackNames.end())), ", got ", event.cat);
    reader.require(std::isfinite(event.ts + event.dur), "ts and dur: must be numbers");
    SpanEvent::Arguments args;
    if (reader.value().contains("args")) args = reader.at("args").as<SpanEvent::Arguments>();
    current_->spans.push_back({.name = event.name,
                               .track = static_cast<Track>(track - kTrackNames.begin()),
                               .begin = event.ts,
                               .duration = event.dur,
                               .thread = event.tid,
                               .number = args.number,
                               .bytes = args.bytes,
                               .flops = args.flops});
  }

  std::string file_;
  ReadTrace& into_;
  std::optional<std::string> held_;  // the line before
  int64_t number_ = 0;
  RankTrace* current_ = nullptr;
};

bool read_file(const fs::path& path, ReadTrace& into) {
  LineTaker lines(path.string(), into);
  const InputFile file(path.string());
  file.for_each_line([&](std::string_view line, int64_t number) { lines.take(line, number); });
  char last = '\n';
  if (file.size() > 0) file.read(file.size() - 1, &last, 1);
  return lines.finish(last != '\n');
}

bool is_part(const fs::path& file) {
  const std::string name = file.filename().string();
  return name.starts_with("trace-rank") && name.ends_with(".json");
}

void require_trace(const fs::path& file, const ReadTrace& trace) {
  require(!trace.parts.empty(), ExitCode::data, file.string(), ": holds no rank of a trace");
}

}  // namespace

ReadTrace read_trace(const fs::path& run) {
  std::error_code ignored;
  ReadTrace out;
  require(fs::exists(run, ignored), ExitCode::usage, run.string(), ": no run folder of that name, and no trace");
  if (!fs::is_directory(run, ignored)) {
    const bool ended = read_file(run, out);
    require_trace(run, out);
    const std::string name = run.filename().string();
    const bool part =
        is_part(run) || (name.starts_with("trace-from-") && name.find("-rank") != std::string::npos);  // an earlier attempt left it
    require(ended || part, ExitCode::data, run.string(), ": ends in the middle");
    return out;
  }
  std::set<fs::path> parts;
  for (fs::directory_iterator entry(run, ignored), end; !ignored && entry != end; entry.increment(ignored)) {
    if (is_part(entry->path())) parts.insert(entry->path());
  }
  for (const fs::path& part : parts) read_file(part, out);
  if (!parts.empty()) {
    require_trace(run, out);
    return out;
  }
  const fs::path joined = joined_trace(run);
  require(fs::exists(joined, ignored), ExitCode::usage, run.string(),
          ": has no trace; train with --set 'training.trace={\"steps\":[2,3]}', the first and the last step to trace");
  const bool ended = read_file(joined, out);
  require_trace(joined, out);
  require(ended, ExitCode::data, joined.string(), ": ends in the middle");
  require(std::ssize(out.parts) == out.ranks, ExitCode::data, joined.string(), ": has ", out.parts.size(), " of ", out.ranks, " ranks");
  return out;
}

}  // namespace mantissa::tools
