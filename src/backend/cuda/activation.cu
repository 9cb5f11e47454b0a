#include <numbers>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/reduce.h"
#include "backend/cuda/values.h"

namespace mantissa {
namespace {

using namespace gpu;

__device__ inline float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

// What a gate and what it lets through become, and both derivatives.
struct Gated {
  float value, dgate, dup;
};

// With s = sigmoid(gate): dgate = up s (1 + gate (1 - s)), dup = gate s.
__device__ inline Gated plain_glu(float gate, float up) {
  const float s = sigmoid(gate);
  return {gate * s * up, up * s * (1.0F + gate * (1.0F - s)), gate * s};
}

// The derivative is 1 at the bounds. NaN stays.
__device__ inline Gated clamped_glu(float gate, float up, float limit) {
  constexpr float kSlope = 1.702F;
  const float g = gate > limit ? limit : gate, u = up > limit ? limit : (up < -limit ? -limit : up), s = sigmoid(kSlope * g);
  return {g * s * (u + 1.0F), gate > limit ? 0.0F : (u + 1.0F) * s * (1.0F + kSlope * g * (1.0F - s)), fabsf(up) > limit ? 0.0F : g * s};
}

__device__ inline Gated glu(float gate, float up, float limit) { return limit > 0.0F ? clamped_glu(gate, up, limit) : plain_glu(gate, up); }

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
    const Gated gated = glu(value_of(gate[j]), value_of(up[j]), limit);
    const float d = value_of(dy[block() * width + j]);
    dgate[j] = rounded<T>(d * weight * gated.dgate);
    dup[j] = rounded<T>(d * weight * gated.dup);
    sum += d * gated.value;
  }
  if (dweights == nullptr) return;
  sum = block_sum(sum);
  if (thread() == 0) dweights[block()] = sum;
}

// The value and the derivative.
struct Slope {
  float value, derivative;
};

// 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3).
struct TanhForm {
  __device__ static Slope at(float x) {
    constexpr auto kFactor = static_cast<float>(std::numbers::sqrt2 * std::numbers::inv_sqrtpi);
    constexpr float kCubic = 0.044715F;
    const float t = tanhf(kFactor * (x + kCubic * x * x * x)), du = kFactor * (1.0F + 3.0F * kCubic * x * x);
    return {0.5F * x * (1.0F + t), 0.5F * (1.0F + t) + 0.5F * x * (1.0F - t * t) * du};
  }
};

// x Phi(x), Phi(x) = 0.5 (1 + erf(x / sqrt(2))).
struct ErfForm {
  __device__ static Slope at(float x) {
    constexpr auto kRootHalf = static_cast<float>(1.0 / std::numbers::sqrt2);
    constexpr auto kDensity = static_cast<float>(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
    const float phi = 0.5F * (1.0F + erff(x * kRootHalf));
    return {x * phi, phi + x * (kDensity * expf(-0.5F * x * x))};
  }
};

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

const float* row_weights_of(const Tensor& weights) { return weights.defined() ? weights.device_data<float>() : nullptr; }

}  // namespace

void CudaBackend::execute(const SwiGluForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    launch(swiglu<T>, {k.out.dim(0), kThreads}, k.x.device_data<T>(), row_weights_of(k.row_weights), k.out.device_data<T>(), k.out.dim(1),
           static_cast<float>(k.limit));
  });
}

void CudaBackend::execute(const SwiGluBackward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    launch(swiglu_backward<T>, {k.dy.dim(0), kThreads}, k.x.device_data<T>(), k.dy.device_data<T>(), row_weights_of(k.row_weights),
           k.dx.device_data<T>(), k.drow_weights.defined() ? k.drow_weights.device_data<float>() : nullptr, k.dy.dim(1),
           static_cast<float>(k.limit));
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
