#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/values.h"

namespace mantissa {
namespace {

using namespace gpu;

template <class T>
__global__ void __launch_bounds__(kThreads) fill(T* out, T value, int64_t count) {
  for_each_element(count, [=](int64_t i) { out[i] = value; });
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads) convert(const From* x, To* out, int64_t count) {
  for_each_element(count, [=](int64_t i) { out[i] = rounded<To>(value_of(x[i])); });
}

template <class T>
__global__ void __launch_bounds__(kThreads) add(const T* a, const T* b, T* out, int64_t count) {
  for_each_element(count, [=](int64_t i) { out[i] = rounded<T>(value_of(a[i]) + value_of(b[i])); });
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_bias(const float* x, const T* bias, T* out, int64_t count, int64_t channels) {
  for_each_element(count, [=](int64_t i) { out[i] = rounded<T>(x[i] + value_of(bias[i % channels])); });
}

}  // namespace

void CudaBackend::execute(const Fill& k) {
  const int64_t count = k.out.elements();
  const Grid grid{blocks_for(count), kThreads};
  switch (k.out.dtype()) {
    case Dtype::f32: return launch(fill<float>, grid, k.out.device_data<float>(), static_cast<float>(k.value), count);
    case Dtype::bf16: return launch(fill<bf16>, grid, k.out.device_data<bf16>(), to_bf16(static_cast<float>(k.value)), count);
    case Dtype::f64: return launch(fill<double>, grid, k.out.device_data<double>(), k.value, count);
    case Dtype::i32: return launch(fill<int32_t>, grid, k.out.device_data<int32_t>(), static_cast<int32_t>(k.value), count);
    case Dtype::u8: return launch(fill<uint8_t>, grid, k.out.device_data<uint8_t>(), static_cast<uint8_t>(k.value), count);
  }
}

void CudaBackend::execute(const Convert& k) {
  const int64_t count = k.x.elements();
  if (k.x.dtype() == k.out.dtype()) return copy(k.x, k.out);
  with_values(k.x.dtype(), [&]<class From>() {
    with_values(k.out.dtype(), [&]<class To>() {
      launch(convert<From, To>, {blocks_for(count), kThreads}, k.x.device_data<From>(), k.out.device_data<To>(), count);
    });
  });
}

void CudaBackend::execute(const Add& k) {
  const int64_t count = k.out.elements();
  with_values(k.out.dtype(), [&]<class T>() {
    launch(add<T>, {blocks_for(count), kThreads}, k.a.device_data<T>(), k.b.device_data<T>(), k.out.device_data<T>(), count);
  });
}

void CudaBackend::execute(const AddBias& k) {
  const int64_t count = k.out.elements();
  with_values(k.out.dtype(), [&]<class T>() {
    launch(add_bias<T>, {blocks_for(count), kThreads}, k.x.device_data<float>(), k.bias.device_data<T>(), k.out.device_data<T>(), count,
           k.out.dim(1));
  });
}

}  // namespace mantissa
