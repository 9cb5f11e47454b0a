#include "metrics/run_trace.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "base/file.h"
#include "base/host_name.h"
#include "json/json_fields.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kBegin = "[\n", kEnd = "\n]\n";

double microseconds(std::chrono::nanoseconds time) { return std::chrono::duration<double, std::micro>(time).count(); }

std::string line_of(const Json& event) { return event.dump(-1, Json::Order::keys); }

std::string metadata(const char* name, int rank, Json args) {
  return line_of({{"name", name}, {"ph", "M"}, {"pid", rank}, {"args", std::move(args)}});
}

std::string span_line(const RecordedSpan& span, int rank) {
  Json line{{"name", span.name},
            {"cat", kTrackNames[static_cast<size_t>(span.track)]},
            {"ph", "X"},
            {"ts", microseconds(span.begin)},
            {"dur", microseconds(span.duration)},
            {"pid", rank},
            {"tid", span.thread}};
  Json args;
  if (span.number >= 0) args.add("number", span.number);
  if (span.track == Track::kernel || span.track == Track::exchange) args.add("bytes", span.bytes);
  if (span.flops > 0.0) args.add("flops", static_cast<int64_t>(span.flops));
  if (!span.operands.empty()) args.add("operands", span.operands);
  if (!args.is_null()) line.add("args", std::move(args));
  return line_of(line);
}

// Returns the first step of a trace or of a part, which the second line says; none for a file that is neither.
std::optional<int64_t> first_step(const fs::path& path) {
  std::string begin(4096, '\0');
  try {
    const File file = File::open(path);
    begin.resize(static_cast<size_t>(std::min(file.size(), std::ssize(begin))));
    file.read_at(0, std::as_writable_bytes(std::span(begin)));
    const std::vector<std::string> lines = split(begin, '\n');
    if (lines.size() < 3 || !lines[1].ends_with(',')) return {};
    const std::string line = lines[1].substr(0, lines[1].size() - 1);
    return JsonReader(parse_json(line, path.string()), path.string()).at("args").at("first").as<int64_t>();
  } catch (const Error&) {
    return {};
  }
}

// Keeps a trace or a part of an earlier attempt of the run under a name with its first step, "trace-from-00005-rank00000.json". One from
// the same step, which this attempt traced again, gives way.
void keep_earlier(const fs::path& path) {
  std::error_code ignored;
  const std::optional<int64_t> first = first_step(path);
  if (!first) {
    fs::remove(path, ignored);
    return;
  }
  std::ostringstream name;
  name << "trace-from-" << std::setw(5) << std::setfill('0') << *first << path.filename().string().substr(std::size("trace") - 1);
  std::error_code error;
  fs::rename(path, path.parent_path() / name.str(), error);
  require(!error, ExitCode::storage, path.string(), ": cannot be kept as ", name.str(), ": ", error.message());
}

// Each rank calls it before its part begins; rank 0 also keeps what is not a part of a rank of this attempt.
void keep_earlier_parts(const fs::path& folder, int rank, int ranks) {
  keep_earlier(trace_part(folder, rank));
  if (rank != 0) return;
  keep_earlier(joined_trace(folder));
  std::error_code ignored;
  std::vector<fs::path> others;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("trace-rank") && name.ends_with(".json") && entry.path().filename() >= trace_part({}, ranks))
      others.push_back(entry.path());
  }
  for (const fs::path& other : others) keep_earlier(other);
}

AppendFile part_file(const fs::path& folder, int rank, int ranks) {
  keep_earlier_parts(folder, rank, ranks);
  return AppendFile(trace_part(folder, rank));
}

// Returns the part without its brackets, in pieces.
void for_each_piece(const File& part, const std::function<void(std::span<const std::byte>)>& body) {
  constexpr int64_t kPiece = 1 << 20;
  const int64_t end = part.size() - std::ssize(kEnd);
  std::vector<std::byte> piece;
  for (int64_t at = std::ssize(kBegin); at < end; at += std::ssize(piece)) {
    piece.resize(static_cast<size_t>(std::min(kPiece, end - at)));
    part.read_at(at, piece);
    body(piece);
  }
}

void require_complete(const File& part) {
  std::string tail(kEnd.size(), '\0');
  if (part.size() > std::ssize(kBegin) + std::ssize(kEnd))
    part.read_at(part.size() - std::ssize(kEnd), std::as_writable_bytes(std::span(tail)));
  require(tail == kEnd, ExitCode::data, part.path().string(), ": has no end: its rank could not write it");
}

}  // namespace

fs::path trace_part(const fs::path& folder, int rank) {
  std::ostringstream name;
  name << "trace-rank" << std::setw(5) << std::setfill('0') << rank << ".json";
  return folder / name.str();
}

fs::path joined_trace(const fs::path& folder) { return folder / "trace.json"; }

TraceFile::TraceFile(const fs::path& folder, const About& about) : file_(part_file(folder, about.rank, about.ranks)), rank_(about.rank) {
  const Json args{{"version", kTraceVersion}, {"ranks", about.ranks},   {"first", about.first}, {"last", about.last},
                  {"attempt", about.attempt}, {"device", about.device}, {"host", host_name()}};
  file_.append(text(kBegin, metadata("mantissa", rank_, args), ",\n",
                    metadata("process_name", rank_, {{"name", text("rank ", rank_, " on ", host_name())}}), ",\n"));
}

void TraceFile::write(const std::vector<RecordedSpan>& spans) {
  constexpr size_t kBlock = 1 << 18;  // bytes that are written at once
  std::string block;
  int64_t lines = 0;
  const auto write_block = [&] {
    const int64_t failures = file_.failures();
    file_.append(block);
    if (file_.failures() == failures) spans_ += lines;
    block.clear(), lines = 0;
  };
  for (const RecordedSpan& span : spans) {
    if (std::ranges::count(threads_, span.thread) == 0 && span.track != Track::module) {
      threads_.push_back(span.thread);
      const bool beside = span.track == Track::exchange;
      const Json args{{"name", beside ? "exchanges" : "computes"}};
      block += line_of({{"name", "thread_name"}, {"ph", "M"}, {"pid", rank_}, {"tid", span.thread}, {"args", args}}) + ",\n";
    }
    block += span_line(span, rank_) + ",\n";
    ++lines;
    if (block.size() >= kBlock) write_block();
  }
  if (!block.empty()) write_block();
}

void TraceFile::end() { file_.append(text(metadata("end", rank_, {{"spans", spans_}}), kEnd)); }

void join_trace(const fs::path& folder, int ranks) {
  std::vector<File> parts;
  for (int rank = 0; rank < ranks; ++rank) {
    parts.push_back(File::open(trace_part(folder, rank)));
    require_complete(parts.back());
  }
  PendingFile joined(joined_trace(folder));
  const auto append = [&joined](std::string_view bytes) { joined.append(std::as_bytes(std::span(bytes))); };
  append(kBegin);
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank > 0) append(",\n");
    for_each_piece(parts[static_cast<size_t>(rank)], [&joined](std::span<const std::byte> piece) { joined.append(piece); });
  }
  append(kEnd);
  joined.sync();
  joined.publish();
  std::error_code ignored;
  for (int rank = 0; rank < ranks; ++rank) fs::remove(trace_part(folder, rank), ignored);
}

// Times the lanes of a device from a mark at which the device had nothing to do. Seconds between marks are exact to a ten millionth of
// them, so the mark from which they are counted follows.
class RunTrace::DeviceClock final : public TraceClock {
 public:
  explicit DeviceClock(Backend& device) : device_(device) {
    device_.synchronize();
    from_ = device_.mark();
    from_time_ = std::chrono::steady_clock::now().time_since_epoch();
    device_.synchronize();  // marks of either lane are behind this one
  }
  bool measures() const { return from_ != nullptr; }
  int lane() const override { return static_cast<int>(current_lane()); }
  std::shared_ptr<const void> mark() override { return device_.mark(); }
  bool reached(const std::shared_ptr<const void>& mark) const override { return device_.reached(mark); }
  std::chrono::nanoseconds time(const std::shared_ptr<const void>& mark) override {
    constexpr double kFar = 1.0;  // seconds
    const double seconds = device_.seconds(from_, mark);
    const auto time = from_time_ + std::chrono::nanoseconds(std::llround(1e9 * seconds));
    if (seconds > kFar) from_ = mark, from_time_ = time;
    return time;
  }

 private:
  Backend& device_;
  Backend::Mark from_;
  std::chrono::nanoseconds from_time_{};
};

RunTrace::RunTrace(const RunConfig& config, Backend& device, const Communicator& world) : config_(config), device_(device), world_(world) {}

RunTrace::~RunTrace() {
  if (state_ == State::tracing) end_part();
}

void RunTrace::begin_step(int64_t number, const std::function<void()>& settle) {
  if (!config_.training.trace || state_ == State::over) return;
  const std::vector<int64_t>& steps = config_.training.trace->steps;
  if (number > steps[1]) return end(settle);
  if (number < steps[0]) return;
  if (state_ == State::tracing) return flush_trace();
  settle();
  state_ = State::tracing;
  start(number);
}

// A trace is not worth the run. A run that was resumed may begin among the steps to trace.
void RunTrace::start(int64_t first) {
  const int64_t last = std::min(config_.training.trace->steps[1], config_.training.steps.value_or(INT64_MAX));
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t attempt = world_.all(int64_t{std::chrono::duration_cast<std::chrono::microseconds>(now).count()}).front();
  clock_ = std::make_unique<DeviceClock>(device_);
  if (!clock_->measures()) clock_ = nullptr;
  if (tracing()) return;
  try {
    const TraceFile::About about{
        .rank = world_.rank(), .ranks = world_.size(), .first = first, .last = last, .attempt = attempt, .device = device_.name()};
    file_ = std::make_unique<TraceFile>(config_.logging.dir, about);
    const bool ours = start_trace([file = file_.get()](const std::vector<RecordedSpan>& spans) { file->write(spans); }, clock_.get());
    if (!ours) file_ = nullptr;
  } catch (const Error& error) {
    log_warning("training.trace: ", error.what());
    file_ = nullptr;
  }
}

void RunTrace::end_part() noexcept {
  if (!file_) return;
  try {
    end_trace();
    file_->end();
  } catch (const std::exception& error) {
    log_warning("training.trace: ", error.what());
  }
  file_ = nullptr;
}

void RunTrace::end(const std::function<void()>& settle) {
  const State before = std::exchange(state_, State::over);
  if (before != State::tracing) return;
  settle();
  if (clock_) device_.synchronize();
  end_part();
  world_.barrier();  // all parts are complete
  if (world_.rank() != 0) return;
  try {
    join_trace(config_.logging.dir, world_.size());
  } catch (const Error& error) {
    log_warning("training.trace: the parts of the ranks stay in ", config_.logging.dir, ": ", error.what());
  }
}

}  // namespace mantissa
