#include "backend/activation_rule.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/reduce.h"
#include "backend/cuda/values.h"

namespace mantissa {
namespace {

using namespace gpu;

// A block has a row, here and backward; weights may be null.
template <class T>
__global__ void __launch_bounds__(kThreads) swiglu(const T* x, const float* weights, T* out, int64_t width, float limit) {
  const T *gate = x + 2 * block() * width, *up = gate + width;
  const float weight = weights != nullptr ? weights[block()] : 1.0F;
  for (int64_t j = thread(); j < width; j += kThreads)
    out[block() * width + j] = rounded<T>(glu(value_of(gate[j]), value_of(up[j]), limit).value * weight);
}

// Both derivatives times dy and the weight, whose gradient is the sum of dy times the values.
template <class T>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward(const T* x, const T* dy, const float* weights, T* dx, float* dweights, int64_t width, float limit) {
  const T *gate = x + 2 * block() * width, *up = gate + width;
  T *dgate = dx + 2 * block() * width, *dup = dgate + width;
  const float weight = weights != nullptr ? weights[block()] : 1.0F;
  float sum = 0.0F;
  for (int64_t j = thread(); j < width; j += kThreads) {
    const Gated<float> gated = glu(value_of(gate[j]), value_of(up[j]), limit);
    const float d = value_of(dy[block() * width + j]);
    dgate[j] = rounded<T>(d * weight * gated.dgate);
    dup[j] = rounded<T>(d * weight * gated.dup);
    sum += d * gated.value;
  }
  if (dweights == nullptr) return;
  sum = block_sum(sum);
  if (thread() == 0) dweights[block()] = sum;
}

template <class Form, class T>
__global__ void __launch_bounds__(kThreads) gelu(const T* x, T* out, int64_t count) {
  for_each_element(count, [=](int64_t i) { out[i] = rounded<T>(Form::at(value_of(x[i])).value); });
}

template <class Form, class T>
__global__ void __launch_bounds__(kThreads) gelu_backward(const T* x, const T* dy, T* dx, int64_t count) {
  for_each_element(count, [=](int64_t i) { dx[i] = rounded<T>(value_of(dy[i]) * Form::at(value_of(x[i])).derivative); });
}

template <class Body>
void with_form(GeluForm form, Body&& body) {
  form == GeluForm::tanh ? body.template operator()<TanhForm>() : body.template operator()<ErfForm>();
}

}  // namespace

void CudaBackend::execute(const SwiGluForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    launch(swiglu<T>, {k.out.dim(0), kThreads}, k.x.device_data<T>(), data_or_null<float>(k.row_weights), k.out.device_data<T>(),
           k.out.dim(1), static_cast<float>(k.limit));
  });
}

void CudaBackend::execute(const SwiGluBackward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    launch(swiglu_backward<T>, {k.dy.dim(0), kThreads}, k.x.device_data<T>(), k.dy.device_data<T>(), data_or_null<float>(k.row_weights),
           k.dx.device_data<T>(), data_or_null<float>(k.drow_weights), k.dy.dim(1), static_cast<float>(k.limit));
  });
}

void CudaBackend::execute(const GeluForward& k) {
  const int64_t count = k.x.elements();
  with_form(k.form, [&]<class Form>() {
    with_values(k.x.dtype(), [&]<class T>() {
      launch(gelu<Form, T>, {blocks_for(count), kThreads}, k.x.device_data<T>(), k.out.device_data<T>(), count);
    });
  });
}

void CudaBackend::execute(const GeluBackward& k) {
  const int64_t count = k.x.elements();
  with_form(k.form, [&]<class Form>() {
    with_values(k.x.dtype(), [&]<class T>() {
      launch(gelu_backward<Form, T>, {blocks_for(count), kThreads}, k.x.device_data<T>(), k.dy.device_data<T>(), k.dx.device_data<T>(),
             count);
    });
  });
}

}  // namespace mantissa
