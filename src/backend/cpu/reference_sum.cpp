#include "backend/checks.h"
#include "backend/cpu/reference.h"

namespace mantissa {
namespace {

template <class T>
double sum(const T* x, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += static_cast<double>(x[i]);
  return total;
}

}  // namespace

void check(const Sum& k) {
  require(k.x.dtype() == Dtype::f32 || k.x.dtype() == Dtype::f64, "sum: x is ", k.x.dtype(), ", not fp32 or fp64");
  require(k.out.dtype() == Dtype::f64 && k.out.elements() == 1, "sum: out is ", k.out.dtype(), " ", k.out.shape(), ", not one fp64");
}

void CpuReference::execute(const Sum& k) {
  check(k);
  const int64_t n = k.x.elements();
  *k.out.data<double>() = k.factor * (k.x.dtype() == Dtype::f64 ? sum(k.x.data<double>(), n) : sum(k.x.data<float>(), n));
}

}  // namespace mantissa
