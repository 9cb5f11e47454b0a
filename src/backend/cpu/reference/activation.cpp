#include "backend/activation_rule.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"

namespace mantissa {
namespace {

template <class S>
Slope<S> gelu(S x, GeluForm form) {
  return form == GeluForm::tanh ? TanhForm::at(x) : ErfForm::at(x);
}

// The weight of a row, 1 without weights.
template <class S>
S row_weight(const Tensor& weights, int64_t row) {
  return weights.defined() ? weights.device_data<S>()[row] : S{1};
}

}  // namespace

void CpuReference::execute(const SwiGluForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t width = k.out.dim(1);
    for (int64_t i = 0; i < k.out.dim(0); ++i) {
      const T *gate = k.x.device_data<T>() + 2 * i * width, *up = gate + width;
      T* out = k.out.device_data<T>() + i * width;
      const S weight = row_weight<S>(k.row_weights, i);
      for (int64_t j = 0; j < width; ++j) out[j] = store<T>(glu<S>(load(gate[j]), load(up[j]), static_cast<S>(k.limit)).value * weight);
    }
  });
}

// Both derivatives times dy and the weight, whose gradient is the sum of dy times the values.
void CpuReference::execute(const SwiGluBackward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t width = k.dy.dim(1);
    for (int64_t i = 0; i < k.dy.dim(0); ++i) {
      const T *gate = k.x.device_data<T>() + 2 * i * width, *up = gate + width, *dy = k.dy.device_data<T>() + i * width;
      T *dgate = k.dx.device_data<T>() + 2 * i * width, *dup = dgate + width;
      const S weight = row_weight<S>(k.row_weights, i);
      S dweight = 0;
      for (int64_t j = 0; j < width; ++j) {
        const Gated<S> gated = glu<S>(load(gate[j]), load(up[j]), static_cast<S>(k.limit));
        const S d = load(dy[j]) * weight;
        dgate[j] = store<T>(d * gated.dgate);
        dup[j] = store<T>(d * gated.dup);
        dweight += load(dy[j]) * gated.value;
      }
      if (k.drow_weights.defined()) k.drow_weights.device_data<S>()[i] = dweight;
    }
  });
}

void CpuReference::execute(const GeluForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    const T* x = k.x.device_data<T>();
    T* out = k.out.device_data<T>();
    for (int64_t i = 0; i < k.x.elements(); ++i) out[i] = store<T>(gelu(load(x[i]), k.form).value);
  });
}

void CpuReference::execute(const GeluBackward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    const T *x = k.x.device_data<T>(), *dy = k.dy.device_data<T>();
    T* dx = k.dx.device_data<T>();
    for (int64_t i = 0; i < k.x.elements(); ++i) dx[i] = store<T>(load(dy[i]) * gelu(load(x[i]), k.form).derivative);
  });
}

}  // namespace mantissa
