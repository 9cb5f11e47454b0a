#include "mantissa/base/limits.h"

#include <execinfo.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstddef>
#include <optional>

#include "base/process_limit.h"
#include "mantissa/base/error.h"

namespace mantissa {
namespace {

constexpr int64_t kPageBytes = 4096;

std::string limit_text(decltype(RLIMIT_AS) resource, const char* what, const char* option) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return text("; ", what, " limited to ", limit.rlim_cur / 1024, " KiB (ulimit ", option, ")");
}

// Returns the bytes below this frame; nullopt if unknown.
std::optional<int64_t> stack_left() {
  pthread_attr_t attributes;
  void* end = nullptr;
  size_t size = 0;
  if (::pthread_getattr_np(::pthread_self(), &attributes) != 0) return {};
  const bool known = ::pthread_attr_getstack(&attributes, &end, &size) == 0;
  ::pthread_attr_destroy(&attributes);
  if (!known) return {};
  return static_cast<std::byte*>(__builtin_frame_address(0)) - static_cast<std::byte*>(end);
}

// A stack grows when it is touched, and where that fails the process ends.
[[gnu::noinline]] void touch_stack() {
  volatile std::byte block[kStackBytes - 4 * kPageBytes];
  for (size_t i = sizeof block; i > static_cast<size_t>(kPageBytes); i -= static_cast<size_t>(kPageBytes)) block[i - 1] = {};
}

}  // namespace

std::string memory_limits() { return limit_text(RLIMIT_AS, "the address space is", "-v") + limit_text(RLIMIT_DATA, "data are", "-d"); }

std::string process_limit() {
  rlimit limit{};
  const bool limited = ::getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  const std::string processes =
      limited ? text("; this user may have ", limit.rlim_cur, " processes and threads (ulimit -u), perhaps fewer in a container") : "";
  return processes + memory_limits() + "; ask for fewer threads (training.threads, --threads)";
}

void require_memory(int64_t bytes, const std::string& purpose) {
  void* const place = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place != MAP_FAILED) ::munmap(place, static_cast<size_t>(bytes));
  require(place != MAP_FAILED, ExitCode::environment, purpose, " needs ", bytes / 1024, " KiB more memory than the system gives",
          memory_limits());
}

void require_stack() {
  const std::optional<int64_t> left = stack_left();
  require(!left || *left >= kStackBytes, ExitCode::environment, "kernels need ", kStackBytes / 1024, " KiB of stack, and this thread has ",
          left.value_or(0) / 1024, " KiB left", limit_text(RLIMIT_STACK, "it is", "-s"));
  require_memory(kStackBytes, "the stack of this thread");
  touch_stack();
}

void require_unwinding() {
  void* frame = nullptr;
  require(::backtrace(&frame, 1) > 0, ExitCode::environment, "libgcc_s cannot be loaded", memory_limits());
}

}  // namespace mantissa
