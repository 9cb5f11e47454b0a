#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

#include "simt/watcher.h"

namespace mantissa::simt {

void Watcher::begin_stack(std::byte* stack, size_t bytes) { __asan_unpoison_memory_region(stack, bytes); }
void Watcher::begin_fiber() {}
void Watcher::end_fiber() {}
void Watcher::is_host() {}
void Watcher::leave(const Watcher&, const void* stack, size_t bytes, bool last) {
  __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, stack, bytes);
}
void Watcher::arrive(const void** stack, size_t* bytes) const { __sanitizer_finish_switch_fiber(fake_stack, stack, bytes); }
void Watcher::pass_for(const Watcher&) const {}

void release(void*) {}
void acquire(void*) {}

}  // namespace mantissa::simt
