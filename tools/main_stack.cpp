#include "main_stack.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <string_view>
#include <thread>

#include "mantissa/base/generated_call.h"
#include "mantissa/base/limits.h"

namespace mantissa::tools {
namespace {

pthread_t watched;
std::atomic<bool> written{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// No signal of the system's or of a scheduler's.
int stack_signal() { return SIGRTMIN; }

bool is_generated(greg_t instruction) {
  Dl_info object{};
  return ::dladdr(std::bit_cast<const void*>(instruction), &object) == 0;
}

void write_frames() {
  std::array<void*, 64> frames{};
  ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), static_cast<int>(frames.size())), STDERR_FILENO);
}

// From inside generated code there is no way back, but unwinding takes the registers of the interrupted code from `context`: for a moment
// they are those of the call.
void write_frames_of_caller(const GeneratedCall& call, mcontext_t& context) {
  const mcontext_t interrupted = context;
  context.gregs[REG_RIP] = static_cast<greg_t>(call.instruction);
  context.gregs[REG_RSP] = static_cast<greg_t>(call.stack);
  context.gregs[REG_RBP] = static_cast<greg_t>(call.frame);
  write_frames();
  context = interrupted;
}

void write_stack(int, siginfo_t*, void* context) {
  const int error = errno;
  mcontext_t& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
  const GeneratedCall* const call = GeneratedCall::current();
  if (call != nullptr && is_generated(registers.gregs[REG_RIP])) {
    constexpr std::string_view kGenerated = "in a kernel that oneDNN generated, called by:\n";
    if (::write(STDERR_FILENO, kGenerated.data(), kGenerated.size()) >= 0) write_frames_of_caller(*call, registers);
  } else {
    write_frames();
  }
  written = true;
  errno = error;
}

}  // namespace

void watch_main_stack() {
  require_unwinding();  // a handler may not load it
  watched = ::pthread_self();
  struct sigaction action {};
  action.sa_sigaction = write_stack;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(stack_signal(), &action, nullptr);
  sigset_t own;
  sigemptyset(&own);
  sigaddset(&own, stack_signal());
  ::pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
}

bool print_main_stack() {
  written = false;
  if (::pthread_kill(watched, stack_signal()) != 0) return false;
  for (int i = 0; i < 100 && !written; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return written;
}

}  // namespace mantissa::tools
