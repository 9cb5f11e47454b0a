// Gives signal handlers a stack of their own on a thread that multiplies. oneDNN's fp32 kernels keep data in the stack pointer (`mov rsp,
// ARG_WS`), so the kernel would write the frame of a handler into the heap.
#pragma once

#include <csignal>
#include <cstddef>

namespace mantissa {

// Belongs to the thread that constructs it, which also destroys it. It serves handlers that were installed with SA_ONSTACK; all others must
// not run on such a thread, which blocks their signals (tools/signals.h).
class AlternateStack {
 public:
  AlternateStack();
  ~AlternateStack();
  AlternateStack(const AlternateStack&) = delete;
  AlternateStack& operator=(const AlternateStack&) = delete;

 private:
  static constexpr size_t kBytes = size_t{256} << 10;  // UCX's handler of crashes asks for 144 KiB

  alignas(64) std::byte memory_[kBytes];
  stack_t previous_{};
};

}  // namespace mantissa
