#include "metrics/run_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <utility>

#include "base/file.h"
#include "base/hash.h"
#include "base/host_name.h"
#include "checkpoint/checkpoint_search.h"
#include "io/pending_folder.h"
#include "json/json_fields.h"
#include "mantissa/base/error.h"
#include "mantissa/base/log.h"
#include "mantissa/base/version.h"

namespace mantissa {

AppendFile::AppendFile(const std::filesystem::path& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  require(fd_ >= 0, ExitCode::environment, path.string(), ": cannot be opened: ", system_message(errno));
  struct stat status {};
  if (::fstat(fd_, &status) == 0) size_ = status.st_size;
}

AppendFile::AppendFile(AppendFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), size_(other.size_), failures_(other.failures_), path_(std::move(other.path_)) {}

AppendFile& AppendFile::operator=(AppendFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  size_ = other.size_;
  failures_ = other.failures_;
  path_ = std::move(other.path_);
  return *this;
}

AppendFile::~AppendFile() {
  if (fd_ >= 0) ::close(fd_);
}

void AppendFile::append(std::string_view record) {
  std::string_view rest = record;
  int error = 0;
  while (!rest.empty() && error == 0) {  // a write that took a part says nothing; the next one says why
    const ssize_t count = ::write(fd_, rest.data(), rest.size());
    if (count > 0) rest.remove_prefix(static_cast<size_t>(count));
    if (count == 0 || (count < 0 && errno != EINTR)) error = count < 0 ? errno : EIO;
  }
  const auto written = static_cast<int64_t>(record.size() - rest.size());
  if (error == 0 || (written > 0 && ::ftruncate(fd_, size_) != 0)) size_ += written;  // a part that cannot be cut stays
  if (error == 0) return;
  if (failures_++ == 0) log_warning(path_.string(), ": writing failed: ", system_message(error), "; further failures are only counted");
}

void AppendFile::cut_torn_line() {
  std::array<char, 4096> block{};
  int64_t end = size_;
  while (end > 0) {
    const int64_t begin = std::max<int64_t>(0, end - static_cast<int64_t>(block.size()));
    const ssize_t got = ::pread(fd_, block.data(), static_cast<size_t>(end - begin), begin);
    if (got != end - begin) return;
    const std::string_view text(block.data(), static_cast<size_t>(got));
    const size_t newline = text.rfind('\n');
    if (newline != std::string_view::npos) {
      end = begin + static_cast<int64_t>(newline) + 1;
      break;
    }
    end = begin;
  }
  if (end == size_) return;
  log_warning(path_.string(), ": the last line is incomplete; its ", size_ - end, " bytes are removed");
  if (::ftruncate(fd_, end) == 0) size_ = end;
}

namespace {

template <class Integer>
void put_little_endian(std::string& out, Integer value) {
  for (size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(static_cast<unsigned char>(value >> (8 * i)));
}

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(static_cast<unsigned char>(value | 0x80));
  out += static_cast<char>(static_cast<unsigned char>(value));
}

// A protobuf key is field number << 3 | wire type.
enum class Wire : uint32_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };
void put_key(std::string& out, uint32_t field, Wire wire) { put_varint(out, field << 3 | static_cast<uint32_t>(wire)); }

void put_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  put_key(out, field, Wire::bytes);
  put_varint(out, bytes.size());
  out += bytes;
}

std::string event_with_time(double wall_time) {
  std::string out;
  put_key(out, 1, Wire::fixed64);
  put_little_endian(out, std::bit_cast<uint64_t>(wall_time));
  return out;
}

void put_double(std::string& out, uint32_t field, double value) {
  put_key(out, field, Wire::fixed64);
  put_little_endian(out, std::bit_cast<uint64_t>(value));
}

std::string summary_event(int64_t step, double wall_time, const std::string& summary) {
  std::string out = event_with_time(wall_time);
  put_key(out, 2, Wire::varint);
  put_varint(out, static_cast<uint64_t>(step));
  put_bytes(out, 5, summary);
  return out;
}

std::string file_name(double wall_time) {
  static std::atomic<int> number{0};  // two files of one process may start within a second
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%010lld", static_cast<long long>(wall_time));
  return std::string("events.out.tfevents.") + seconds.data() + "." + host_name() + "." + std::to_string(::getpid()) + "." +
         std::to_string(number++);
}

}  // namespace

uint32_t crc32c(std::string_view bytes) { return reflected_crc<kCastagnoliPolynomial>(bytes); }

uint32_t masked_crc32c(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

std::string event_record(std::string_view data) {
  std::string out;
  put_little_endian(out, uint64_t{data.size()});
  put_little_endian(out, masked_crc32c(out));
  out += data;
  put_little_endian(out, masked_crc32c(data));
  return out;
}

std::string version_event(double wall_time) {
  std::string out = event_with_time(wall_time);
  put_bytes(out, 3, "brain.Event:2");
  return out;
}

std::string scalar_event(int64_t step, double wall_time, std::span<const TaggedValue> scalars) {
  std::string summary;
  for (const TaggedValue& scalar : scalars) {
    std::string value;
    put_bytes(value, 1, scalar.tag);
    put_key(value, 2, Wire::fixed32);
    put_little_endian(value, std::bit_cast<uint32_t>(scalar.value));
    put_bytes(summary, 1, value);
  }
  return summary_event(step, wall_time, summary);
}

std::string histogram_event(int64_t step, double wall_time, std::string_view tag, const std::map<int, int64_t>& counts) {
  require(!counts.empty(), "a histogram of nothing: ", tag);
  const int least = counts.begin()->first, greatest = counts.rbegin()->first;
  double number = 0.0, sum = 0.0, squares = 0.0;
  std::string ends, buckets;
  put_little_endian(ends,
                    std::bit_cast<uint64_t>(least - 0.5));  // an empty bucket first: TensorBoard takes its end for where the next begins
  put_little_endian(buckets, std::bit_cast<uint64_t>(0.0));
  for (int value = least; value <= greatest; ++value) {
    const auto found = counts.find(value);
    const double count = found == counts.end() ? 0.0 : static_cast<double>(found->second);
    number += count, sum += count * value, squares += count * value * value;
    put_little_endian(ends, std::bit_cast<uint64_t>(value + 0.5));
    put_little_endian(buckets, std::bit_cast<uint64_t>(count));
  }
  std::string histogram, value, summary;
  put_double(histogram, 1, least);
  put_double(histogram, 2, greatest);
  put_double(histogram, 3, number);
  put_double(histogram, 4, sum);
  put_double(histogram, 5, squares);
  put_bytes(histogram, 6, ends);
  put_bytes(histogram, 7, buckets);
  put_bytes(value, 1, tag);
  put_bytes(value, 5, histogram);
  put_bytes(summary, 1, value);
  return summary_event(step, wall_time, summary);
}

EventFile::EventFile(const std::filesystem::path& folder, double wall_time) : file_(folder / file_name(wall_time)) {
  file_.append(event_record(version_event(wall_time)));
}

void EventFile::write(int64_t step, double wall_time, std::span<const TaggedValue> scalars) {
  file_.append(event_record(scalar_event(step, wall_time, scalars)));
}

void EventFile::write_histogram(int64_t step, double wall_time, std::string_view tag, const std::map<int, int64_t>& counts) {
  file_.append(event_record(histogram_event(step, wall_time, tag, counts)));
}

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
  std::error_code ignored;
  const bool saved = fs::is_directory(checkpoints, ignored) && !list_checkpoints(checkpoints).empty();
  const bool folder_used = metrics || (saved && checkpoints.parent_path() == folder);
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
  if (event.divergence) values.push_back({"train/kl", static_cast<float>(*event.divergence)});
  if (event.cross_entropy) values.push_back({"train/ce", static_cast<float>(*event.cross_entropy)});
  values.insert(values.end(), {{"train/grad_norm", static_cast<float>(event.gradient_norm)},
                               {"train/lr", static_cast<float>(event.lr)},
                               {"perf/tokens_per_sec", static_cast<float>(event.tokens_per_second)},
                               {"mem/peak_gib", static_cast<float>(event.memory_gib)}});
  if (event.padding > 0.0) values.push_back({"data/padding", static_cast<float>(event.padding)});
  if (event.gpu_memory_gib) values.push_back({"mem/gpu_peak_gib", static_cast<float>(*event.gpu_memory_gib)});
  if (!event.routing.empty()) {
    const LayerRouting& worst = most_uneven(event.routing);
    values.push_back({"moe/imbalance", static_cast<float>(worst.imbalance)});
    if (worst.balance_loss) values.push_back({"moe/balance_loss", static_cast<float>(*worst.balance_loss)});
    if (worst.z_loss) values.push_back({"moe/z_loss", static_cast<float>(*worst.z_loss)});
    values.push_back({"moe/dropped", static_cast<float>(mean_dropped(event.routing))});
  }
  if (event.mfu) values.push_back({"perf/mfu", static_cast<float>(*event.mfu)});
  if (event.mfu_measured) values.push_back({"perf/mfu_meas", static_cast<float>(*event.mfu_measured)});
  events_->write(event.step, now, values);
}

void Metrics::write(const EvaluationEvent& event) {
  const double now = unix_time();
  append(lines_, "eval", event, now);
  if (!events_) return;
  std::vector<TaggedValue> values = {{"valid/loss", static_cast<float>(event.result.loss)}};
  if (event.result.divergence) values.push_back({"valid/kl", static_cast<float>(*event.result.divergence)});
  events_->write(event.step, now, values);
}

void Metrics::write(const SampleEvent& event) { append(lines_, "sample", event); }

void Metrics::write(const StragglerEvent& event) { append(lines_, "straggler", event); }

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
