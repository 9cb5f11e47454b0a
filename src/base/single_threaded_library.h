// What every body of parallel_for runs under, whichever way threads are made.
#pragma once

#include <omp.h>
#include <xmmintrin.h>

namespace mantissa {

// While it lives, libraries called on this thread see OpenMP at one thread, and subnormals are honoured. Restores the thread's settings.
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

}  // namespace mantissa
