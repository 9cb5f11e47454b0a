#include "mantissa/base/unblocked_output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "mantissa/base/error.h"

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

}  // namespace mantissa
