#include <omp.h>
#include <sched.h>
#include <xmmintrin.h>

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

// Restores the caller's settings: the library is at one thread only while a body runs.
class SingleThreadedLibrary {
 public:
  SingleThreadedLibrary() : threads_(omp_get_max_threads()), mxcsr_(_mm_getcsr()) {
    if (threads_ != 1) omp_set_num_threads(1);
    _mm_setcsr(mxcsr_ & ~0x8040U);  // clear flush-to-zero and denormals-are-zero
  }
  ~SingleThreadedLibrary() {
    if (threads_ != 1) omp_set_num_threads(threads_);
    _mm_setcsr(mxcsr_);
  }
  SingleThreadedLibrary(const SingleThreadedLibrary&) = delete;
  SingleThreadedLibrary& operator=(const SingleThreadedLibrary&) = delete;

 private:
  int threads_;
  unsigned mxcsr_;
};

}  // namespace

int num_threads() {
  static const int cores = default_threads();
  const int wanted = configured.load(std::memory_order_relaxed);
  return wanted > 0 ? wanted : cores;
}

void set_num_threads(int threads) { configured.store(threads, std::memory_order_relaxed); }

void detail::parallel_chunks(int64_t count, int64_t chunk, ChunkBody body, void* context) {
  if (count <= 0) return;
  const int64_t pieces = (count + chunk - 1) / chunk;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), pieces));
  if (threads <= 1 || omp_in_parallel()) {
    const SingleThreadedLibrary guard;
    for (int64_t i = 0; i < pieces; ++i) body(context, i * chunk, std::min(count, (i + 1) * chunk));
    return;
  }
  // Pieces are handed out in order, so a slow core delays one piece and not half of them.
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    const SingleThreadedLibrary guard;
    for (int64_t i = next.fetch_add(1); i < pieces; i = next.fetch_add(1)) body(context, i * chunk, std::min(count, (i + 1) * chunk));
  }
}

}  // namespace mantissa
