#include "mantissa/base/log.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/details/os.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <memory>
#include <mutex>
#include <vector>

#include "mantissa/base/text.h"

namespace mantissa {
namespace {

constexpr size_t kMostWaiting = size_t{1} << 20;
constexpr int kReaderMilliseconds = 2000;

bool takes_more(int fd, int milliseconds) {
  pollfd wait{.fd = fd, .events = POLLOUT, .revents = 0};
  int ready = 0;
  do {
    ready = ::poll(&wait, 1, milliseconds);
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

int64_t lines_in(std::string_view text) { return std::count(text.begin(), text.end(), '\n'); }

}  // namespace

// Others share the descriptor, so it must not be made non-blocking itself. It is opened anew, which makes it this object's own.
UnblockedOutput::UnblockedOutput(int fd) : fd_(fd) {
  struct stat status {};
  if (::fstat(fd, &status) == 0 && (S_ISFIFO(status.st_mode) || ::isatty(fd) == 1))
    own_ = ::open(text("/proc/self/fd/", fd).c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
}

UnblockedOutput::~UnblockedOutput() {
  finish();
  if (own_ >= 0) ::close(own_);
}

void UnblockedOutput::drop() {
  dropped_ += lines_in(waiting_);
  waiting_.clear();
}

void UnblockedOutput::give_up() {
  given_up_ = true;
  drop();
}

void UnblockedOutput::write(std::string_view lines) {
  flush();
  if (given_up_ || waiting_.size() >= kMostWaiting) {
    dropped_ += lines_in(lines);
    return;
  }
  if (waiting_.empty()) taken_at_ = Clock::now();
  waiting_ += lines;
  flush();
}

void UnblockedOutput::flush() {
  while (!waiting_.empty()) {
    // If the descriptor could not be opened anew, ask first: a pipe with room has room for so much, and a file always has.
    if (own_ < 0 && !takes_more(fd_, 0)) return;
    const ssize_t written = ::write(fd(), waiting_.data(), own_ < 0 ? std::min<size_t>(waiting_.size(), PIPE_BUF) : waiting_.size());
    if (written < 0 && errno == EAGAIN) return;
    if (written < 0 && errno != EINTR) {
      error_ = errno;
      return drop();
    }
    if (written > 0) {
      waiting_.erase(0, static_cast<size_t>(written));
      taken_at_ = Clock::now();
    }
  }
}

double UnblockedOutput::seconds_waiting() const {
  return waiting_.empty() ? 0.0 : std::chrono::duration<double>(Clock::now() - taken_at_).count();
}

void UnblockedOutput::finish() {
  for (flush(); !waiting_.empty() && takes_more(fd(), kReaderMilliseconds);) flush();
  drop();
}

namespace {

constexpr size_t kMaxKeptRecords = 1000;
constexpr const char* kContinued = "\n  ";  // a message of several lines stays one visible entry
using KeptRecords = spdlog::sinks::ringbuffer_sink_mt;

std::atomic<int64_t> dropped{0};
std::mutex mutex;
std::shared_ptr<spdlog::logger> logger;
std::string speaker;                // speaker of the log that is open
std::shared_ptr<KeptRecords> kept;  // the records of a log without a file, until one is named

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::debug: return spdlog::level::debug;
    case LogLevel::info: return spdlog::level::info;
    case LogLevel::warning: return spdlog::level::warn;
    case LogLevel::error: return spdlog::level::err;
    case LogLevel::off: return spdlog::level::off;
  }
  return spdlog::level::info;
}

// Writes to standard error without waiting for a reader. The name of the level has a color on a terminal.
class ErrorSink : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t buffer;
    formatter_->format(message, buffer);
    std::string line(buffer.data(), buffer.size());
    if (colored_ && message.color_range_end > message.color_range_start) {
      line.insert(message.color_range_end, "\x1b[m");
      line.insert(message.color_range_start, message.level >= spdlog::level::err ? "\x1b[31m\x1b[1m" : "\x1b[33m\x1b[1m");
    }
    const int64_t before = out_.dropped_lines();
    out_.write(line);
    dropped += out_.dropped_lines() - before;
  }
  void flush_() override { out_.flush(); }

 private:
  UnblockedOutput out_{STDERR_FILENO};
  const bool colored_ = ::isatty(STDERR_FILENO) == 1 && spdlog::details::os::is_color_terminal();
};

// Writes kept records with the times at which they were made.
void write_kept(spdlog::sinks::sink& file) {
  if (!kept) return;
  const auto records = kept->last_raw();
  size_t written = 0;
  try {
    for (; written < records.size(); ++written) file.log(records[written]);
    file.flush();
  } catch (const spdlog::spdlog_ex&) {  // a full log disk must not stop training
    dropped += std::max<int64_t>(1, static_cast<int64_t>(records.size() - written));
  }
}

}  // namespace

void open_log(const LogOptions& options) {
  std::vector<spdlog::sink_ptr> sinks;
  if (options.console) {
    sinks.push_back(std::make_shared<ErrorSink>());
    sinks.back()->set_level(to_spdlog(options.console_level));
  }
  const bool has_file = !options.file.empty();
  const auto keeping = has_file ? nullptr : std::make_shared<KeptRecords>(kMaxKeptRecords);
  if (keeping) sinks.push_back(keeping);
  try {
    if (has_file) sinks.push_back(std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.file));
  } catch (const spdlog::spdlog_ex& error) {
    fail(ExitCode::environment, "log file ", options.file, ": ", error.what());
  }
  auto next = std::make_shared<spdlog::logger>("mantissa", sinks.begin(), sinks.end());
  next->set_pattern("%Y-%m-%d %H:%M:%S %^%l%$ %v");
  next->set_level(to_spdlog(options.level));
  next->flush_on(spdlog::level::info);
  next->set_error_handler([](const std::string&) { ++dropped; });  // a full log disk must not stop training
  const std::lock_guard lock(mutex);
  if (has_file) write_kept(*sinks.back());
  kept = keeping;
  logger = std::move(next);
  speaker = options.who;
}

void close_log() {
  const std::lock_guard lock(mutex);
  logger.reset();
  kept.reset();
}

int64_t dropped_log_lines() { return dropped; }

void write_log(LogLevel level, const std::string& message) {
  std::shared_ptr<spdlog::logger> current;
  std::string who;
  {
    const std::lock_guard lock(mutex);
    current = logger;
    who = speaker;
  }
  if (current) current->log(to_spdlog(level), "{}{}", who, printable(message, kContinued));
}

}  // namespace mantissa
