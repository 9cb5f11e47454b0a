#include <sanitizer/tsan_interface.h>

#include "simt/watcher.h"

namespace mantissa::simt {

void Watcher::begin_stack(std::byte*, size_t) {}
void Watcher::begin_fiber() { fiber = __tsan_create_fiber(0); }
void Watcher::end_fiber() { __tsan_destroy_fiber(fiber); }
void Watcher::is_host() { fiber = __tsan_get_current_fiber(); }
void Watcher::leave(const Watcher& to, const void*, size_t, bool) { pass_for(to); }
void Watcher::arrive(const void**, size_t*) const {}
void Watcher::pass_for(const Watcher& other) const { __tsan_switch_to_fiber(other.fiber, __tsan_switch_to_fiber_no_sync); }

void release(void* tag) { __tsan_release(tag); }
void acquire(void* tag) { __tsan_acquire(tag); }

}  // namespace mantissa::simt
