#include "tools/main_stack.h"

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
#include <string>
#include <thread>

#include "mantissa/base/generated_call.h"
#include "mantissa/base/limits.h"
#include "mantissa/base/unblocked_output.h"
#include "tools/function_names.h"

namespace mantissa::tools {
namespace {

pthread_t watched;

// Notes of the watched thread: no names, because they take memory, which a handler may not.
struct Noted {
  std::array<void*, 64> frames{};
  int count = 0;
  bool in_kernel = false;  // in a kernel of oneDNN's; the frames are those of its callers
};
Noted noted;
std::atomic<bool> answered{false};
static_assert(std::atomic<bool>::is_always_lock_free);

// Returns a signal that is none of the system's or of a scheduler's.
int stack_signal() { return SIGRTMIN; }

bool is_generated(greg_t instruction) {
  Dl_info object{};
  return ::dladdr(std::bit_cast<const void*>(instruction), &object) == 0;
}

void note_frames() { noted.count = ::backtrace(noted.frames.data(), static_cast<int>(noted.frames.size())); }

// From inside generated code there is no way back, but unwinding takes the registers of the interrupted code from `context`: for a moment
// they are those of the call.
void note_frames_of_caller(const GeneratedCall& call, mcontext_t& context) {
  const mcontext_t interrupted = context;
  context.gregs[REG_RIP] = static_cast<greg_t>(call.instruction);
  context.gregs[REG_RSP] = static_cast<greg_t>(call.stack);
  context.gregs[REG_RBP] = static_cast<greg_t>(call.frame);
  note_frames();
  context = interrupted;
}

void note_stack(int, siginfo_t*, void* context) {
  const int error = errno;
  mcontext_t& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
  const GeneratedCall* const call = GeneratedCall::current();
  noted.in_kernel = call != nullptr && is_generated(registers.gregs[REG_RIP]);
  noted.in_kernel ? note_frames_of_caller(*call, registers) : note_frames();
  answered = true;
  errno = error;
}

}  // namespace

void watch_main_stack() {
  require_unwinding();  // a handler may not load it
  watched = ::pthread_self();
  struct sigaction action {};
  action.sa_sigaction = note_stack;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(stack_signal(), &action, nullptr);
  sigset_t own;
  sigemptyset(&own);
  sigaddset(&own, stack_signal());
  ::pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
}

bool print_main_stack() {
  answered = false;
  if (::pthread_kill(watched, stack_signal()) != 0) return false;
  for (int i = 0; i < 100 && !answered; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (!answered) return false;
  const FunctionNames names;
  std::string lines = noted.in_kernel ? "in a kernel that oneDNN generated, called by:\n" : "";
  for (int i = 0; i < noted.count; ++i) {
    // Calls end where the next instruction begins, which may be another function's.
    const void* const call = static_cast<const char*>(noted.frames[static_cast<size_t>(i)]) - 1;
    lines += names.describe(call) + '\n';
  }
  UnblockedOutput(STDERR_FILENO).write(lines);
  return true;
}

}  // namespace mantissa::tools
