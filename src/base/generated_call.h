// Records where a thread called generated code, for stack reports. A kernel of oneDNN has no tables for unwinding and may keep data in the
// stack pointer, so its stack cannot be unwound from inside.
#pragma once

#include <atomic>
#include <cstdint>

namespace mantissa {

// Lives around such a call. On x86-64, the registers held these values at `instruction`, an address in the function that has this object.
class GeneratedCall {
 public:
  [[gnu::always_inline]] GeneratedCall() : caller_(innermost) {
    asm volatile("mov %%rbp, %0\n\tmov %%rsp, %1\n\tlea 0(%%rip), %2" : "=a"(frame), "=d"(stack), "=c"(instruction));
    std::atomic_signal_fence(std::memory_order_release);
    innermost = this;
  }
  ~GeneratedCall() { innermost = caller_; }
  GeneratedCall(const GeneratedCall&) = delete;
  GeneratedCall& operator=(const GeneratedCall&) = delete;

  // Returns the innermost of this thread, or null; a signal handler may call it.
  static const GeneratedCall* current() { return innermost; }

  uint64_t frame, stack, instruction;  // rbp, rsp, rip

 private:
  inline static constinit thread_local const GeneratedCall* innermost = nullptr;
  const GeneratedCall* caller_;
};

}  // namespace mantissa
