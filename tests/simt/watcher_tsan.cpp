#include <sanitizer/tsan_interface.h>
#include <sys/mman.h>

#include "simt/watcher.h"

namespace mantissa::simt {

// Maps new pages, of which ThreadSanitizer does not know that the same thread of another block had them.
void Watcher::begin_stack(std::byte* stack, size_t bytes) {
  mmap(stack, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}
void Watcher::begin_fiber() { fiber = __tsan_create_fiber(0); }
void Watcher::end_fiber() { __tsan_destroy_fiber(fiber); }
void Watcher::is_host() { fiber = __tsan_get_current_fiber(); }
void Watcher::leave(const Watcher& to, const void*, size_t, bool) { pass_for(to); }
void Watcher::arrive(const void**, size_t*) const {}
void Watcher::pass_for(const Watcher& other) const { __tsan_switch_to_fiber(other.fiber, __tsan_switch_to_fiber_no_sync); }

void release(void* tag) { __tsan_release(tag); }
void acquire(void* tag) { __tsan_acquire(tag); }

}  // namespace mantissa::simt
