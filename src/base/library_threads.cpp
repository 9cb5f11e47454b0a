#include <omp.h>

#include "mantissa/base/parallel.h"

namespace mantissa {

void with_library_threads(const std::function<void()>& body) {
  const int previous = omp_get_max_threads();
  omp_set_num_threads(num_threads());
  body();
  omp_set_num_threads(previous);
}

}  // namespace mantissa
