// Sets up every body of parallel_for, whichever way threads are made.
#pragma once

#include <omp.h>
#include <xmmintrin.h>

#include "mantissa/base/parallel.h"

namespace mantissa {

// Flush-to-zero and denormals-are-zero of MXCSR.
inline constexpr unsigned kFlushBits = 0x8040U;

inline unsigned with_subnormals(unsigned mxcsr, Subnormals subnormals) {
  return subnormals == Subnormals::flushed ? mxcsr | kFlushBits : mxcsr & ~kFlushBits;
}

// While it lives, libraries called on this thread see OpenMP at one thread, and subnormals are treated as asked. Restores the thread's
// settings.
class SingleThreadedLibrary {
 public:
  explicit SingleThreadedLibrary(Subnormals subnormals) : threads_(omp_get_max_threads()), mxcsr_(_mm_getcsr()) {
    if (threads_ != 1) omp_set_num_threads(1);
    _mm_setcsr(with_subnormals(mxcsr_, subnormals));
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

}  // namespace mantissa
