#include "signals.h"

#include <csignal>

namespace mantissa::tools {
namespace {

volatile std::sig_atomic_t stop_asked = 0;
volatile std::sig_atomic_t save_asked = 0;

void on_stop(int) { stop_asked = 1; }
void on_save(int) { save_asked = 1; }

void watch(int signal, void (*handler)(int), int flags) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART | flags;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, nullptr);
}

}  // namespace

void watch_signals() {
  // The kernel restores the default action after the first SIGINT, so a second one ends the process at once.
  watch(SIGINT, on_stop, static_cast<int>(SA_RESETHAND));
  watch(SIGTERM, on_stop, 0);
  watch(SIGUSR1, on_stop, 0);
  watch(SIGUSR2, on_save, 0);
  watch(SIGPIPE, SIG_IGN, 0);
}

bool stop_requested() { return stop_asked != 0; }

Request take_request() {
  if (stop_requested()) return Request::save_and_stop;
  if (save_asked == 0) return Request::none;
  save_asked = 0;
  return Request::save;
}

}  // namespace mantissa::tools
