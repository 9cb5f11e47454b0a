#include "tools/launch/launch_output.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <utility>

#include "mantissa/base/error.h"
#include "mantissa/base/file.h"

namespace mantissa::tools {
namespace {

constexpr size_t kMostPending = size_t{1} << 16;
constexpr size_t kMostErrors = 1024;  // remembered

int opened_log(const std::string& path) {
  if (path.empty()) return -1;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
  require(fd >= 0, path_failure(errno), path, ": cannot be opened: ", system_message(errno));
  return fd;
}

}  // namespace

WorkerStream::WorkerStream(int from, UnblockedOutput* to, std::string prefix, const std::string& log, ShownErrors& errors)
    : from_(from), to_(to), log_(opened_log(log)), prefix_(std::move(prefix)), errors_(&errors) {}

WorkerStream::WorkerStream(WorkerStream&& other) noexcept
    : from_(std::exchange(other.from_, -1)),
      rest_(other.rest_),
      to_(other.to_),
      log_(std::exchange(other.log_, -1)),
      log_error_(other.log_error_),
      prefix_(std::move(other.prefix_)),
      pending_(std::move(other.pending_)),
      errors_(other.errors_),
      error_(other.error_),
      held_(std::move(other.held_)) {}

WorkerStream::~WorkerStream() {
  if (from_ >= 0) ::close(from_);
  if (log_ >= 0) ::close(log_);
}

void WorkerStream::read() {
  std::array<char, kMostPending> block;
  const ssize_t got = ::read(from_, block.data(), block.size());
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got <= 0) return close();
  rest_ = std::max<int64_t>(0, rest_ - got);
  const std::string_view bytes(block.data(), static_cast<size_t>(got));
  write_log(bytes);
  if (to_ != nullptr) pending_ += bytes;
  show(false);
}

void WorkerStream::note_rest() {
  int bytes = 0;
  if (from_ >= 0 && ::ioctl(from_, FIONREAD, &bytes) == 0) rest_ = bytes;
}

void WorkerStream::close() {
  show(true);
  rest_ = 0;
  if (from_ >= 0) ::close(std::exchange(from_, -1));
}

// A full disk does not stop the launcher.
void WorkerStream::write_log(std::string_view bytes) {
  while (log_ >= 0 && !bytes.empty()) {
    const ssize_t written = ::write(log_, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) {
      log_error_ = log_error_ != 0 ? log_error_ : errno;
      return;
    }
    if (written > 0) bytes.remove_prefix(static_cast<size_t>(written));
  }
}

// Returns nothing, the line behind its prefix, or that and what was held back before it.
std::string WorkerStream::shown(const std::string& line) {
  const bool begins = line.starts_with("error: "), continues = error_ && line.starts_with("  ");
  if (!continues) {
    error_.reset();
    held_.clear();
  }
  if (!begins && !continues) return prefix_ + line;
  error_ = xxh64(std::as_bytes(std::span(line)), error_ ? error_->value : 0);
  held_ += prefix_ + line;
  const auto found = errors_->find(error_->value);
  if (found != errors_->end() && found->second != prefix_) return "";
  if (found == errors_->end() && errors_->size() < kMostErrors) errors_->emplace(error_->value, prefix_);
  return std::exchange(held_, {});
}

// Writes all at once, so that lines of several launchers do not mix.
void WorkerStream::show(bool all) {
  std::string out;
  size_t begin = 0;
  for (size_t end = pending_.find('\n'); end != std::string::npos; end = pending_.find('\n', begin)) {
    out += shown(pending_.substr(begin, end + 1 - begin));
    begin = end + 1;
  }
  pending_.erase(0, begin);
  if (!pending_.empty() && (all || pending_.size() >= kMostPending)) {
    out += prefix_ + pending_ + "\n";
    pending_.clear();
  }
  if (to_ != nullptr && !out.empty()) to_->write(out);
}

}  // namespace mantissa::tools
