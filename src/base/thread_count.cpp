#include <sched.h>

#include <algorithm>
#include <atomic>

#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

std::atomic<int> configured{0};

int default_threads() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
  return std::max(1, CPU_COUNT(&cores));
}

}  // namespace

int num_threads() {
  static const int cores = default_threads();
  const int wanted = configured.load(std::memory_order_relaxed);
  return wanted > 0 ? wanted : cores;
}

void set_num_threads(int threads) { configured.store(threads, std::memory_order_relaxed); }

}  // namespace mantissa
