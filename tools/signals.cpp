#include "tools/signals.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <system_error>
#include <thread>

#include "base/limits.h"
#include "base/parallel.h"

namespace mantissa::tools {
namespace {

std::atomic<bool> stop_asked{false}, save_asked{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void on_stop(int) { stop_asked = true; }
void on_save(int) { save_asked = true; }

void watch(int signal, void (*handler)(int), int flags) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART | flags;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

// Blocks or unblocks them, by SIG_BLOCK or SIG_UNBLOCK, in the calling thread.
void mask_sent_signals(int operation) {
  const sigset_t sent = sent_signals();
  ::pthread_sigmask(operation, &sent, nullptr);
}

}  // namespace

void watch_signals() {
  mask_sent_signals(SIG_BLOCK);
  // The kernel restores the default action after the first SIGINT, so a second one ends the process at once.
  watch(SIGINT, on_stop, static_cast<int>(SA_RESETHAND));
  watch(SIGTERM, on_stop, 0);
  watch(SIGUSR1, on_stop, 0);
  if (!ignores_hangup()) watch(SIGHUP, on_stop, 0);
  watch(SIGUSR2, on_save, 0);
  watch(SIGPIPE, SIG_IGN, 0);
  try {
    std::thread([] {
      mask_sent_signals(SIG_UNBLOCK);
      while (true) ::pause();
    }).detach();
  } catch (const std::system_error& refused) {
    fail(ExitCode::environment, "the thread that takes signals cannot be started: ", refused.what(), memory_limits());
  }
}

bool stop_requested() { return stop_asked; }

Request take_request() {
  if (stop_requested()) return Request::save_and_stop;
  return save_asked.exchange(false) ? Request::save : Request::none;
}

bool ignores_hangup() {
  struct sigaction action {};
  ::sigaction(SIGHUP, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

}  // namespace mantissa::tools
