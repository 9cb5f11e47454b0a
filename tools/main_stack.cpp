#include "main_stack.h"

#include <execinfo.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>

#include "mantissa/base/limits.h"

namespace mantissa::tools {
namespace {

pthread_t watched;
std::atomic<bool> written{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// No signal of the system's or of a scheduler's.
int stack_signal() { return SIGRTMIN; }

void write_stack(int) {
  const int error = errno;
  std::array<void*, 64> frames{};
  ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), static_cast<int>(frames.size())), STDERR_FILENO);
  written = true;
  errno = error;
}

}  // namespace

void watch_main_stack() {
  require_unwinding();  // a handler may not load it
  watched = ::pthread_self();
  struct sigaction action {};
  action.sa_handler = write_stack;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(stack_signal(), &action, nullptr);
}

bool print_main_stack() {
  written = false;
  if (::pthread_kill(watched, stack_signal()) != 0) return false;
  for (int i = 0; i < 100 && !written; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return written;
}

}  // namespace mantissa::tools
