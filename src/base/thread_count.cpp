#include <sched.h>

#include <algorithm>
#include <atomic>

#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

std::atomic<int> configured{0}, chosen_default{0};  // 0: not

int usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

}  // namespace

int num_threads() {
  static const int cores = usable_cores();
  for (const std::atomic<int>* wanted : {&configured, &chosen_default}) {
    if (const int threads = wanted->load(std::memory_order_relaxed); threads > 0) return threads;
  }
  return cores;
}

void set_num_threads(int threads) { configured.store(threads, std::memory_order_relaxed); }
void set_default_threads(int threads) { chosen_default.store(threads, std::memory_order_relaxed); }

}  // namespace mantissa
