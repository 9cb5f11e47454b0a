#include "backend/cpu/reference/reference.h"

namespace mantissa {
namespace {

template <class T>
double sum(const T* x, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += static_cast<double>(x[i]);
  return total;
}

}  // namespace

void CpuReference::execute(const Sum& k) {
  const int64_t n = k.x.elements();
  *k.out.device_data<double>() =
      k.factor * (k.x.dtype() == Dtype::f64 ? sum(k.x.device_data<double>(), n) : sum(k.x.device_data<float>(), n));
}

}  // namespace mantissa
