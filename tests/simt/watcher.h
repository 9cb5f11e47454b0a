// Tells sanitizers of fibers: in watcher_none.cpp nothing, in watcher_asan.cpp their stacks, in watcher_tsan.cpp that each is a thread of
// its own. CMake takes one. This and executor.cpp are compiled without ThreadSanitizer, as turns order their fibers.
#pragma once

#include <cstddef>

namespace mantissa::simt {

struct Watcher {
  void* fake_stack = nullptr;
  void* fiber = nullptr;

  static void begin_stack(std::byte* stack, size_t bytes);  // a block that failed leaves frames
  void begin_fiber();
  void end_fiber();
  void is_host();  // the thread that switches
  // These stand around a switch to another fiber with this stack; the last switch of a fiber leaves nothing behind.
  void leave(const Watcher& to, const void* stack, size_t bytes, bool last = false);
  void arrive(const void** stack, size_t* bytes) const;  // gives the stack that was left
  void pass_for(const Watcher& other) const;             // without a switch
};

void release(void* tag);
void acquire(void* tag);

}  // namespace mantissa::simt
