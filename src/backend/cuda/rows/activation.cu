#include <numbers>

#include "backend/activation_rule.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/gemm/aligned.h"

namespace mantissa {
namespace {

using namespace gpu;

// Without the branches of an exact quotient and exponential.
struct FastSigmoid {
  __device__ static float at(float x) { return fast_reciprocal(1.0F + fast_exp2(x * -std::numbers::log2e_v<float>)); }
};

// Rows of gates, and of what they let through behind them, `width` each.
template <bool kWhole, bool kClamped>
struct GluRows {
  int64_t rows, width;
  const float* weights;  // one for each row; null: ones
  float limit;

  __device__ float weight(int64_t row) const { return weights != nullptr ? weights[row] : 1.0F; }
  // Half `which` of x [rows, 2, width], and rows of y [rows, width].
  template <class T>
  __device__ Packs<T, kWhole> half(T* x, int64_t row, int64_t which) const {
    return {x + (2 * row + which) * width, width, kWhole};
  }
  template <class T>
  __device__ Packs<T, kWhole> of(T* y, int64_t row) const {
    return {y + row * width, width, kWhole};
  }
  __device__ Gated<float> gated(float gate, float up) const {
    if constexpr (kClamped) return clamped_glu<FastSigmoid>(gate, up, limit);
    return plain_glu<FastSigmoid>(gate, up);
  }
};

template <class Team, class Rows, class T>
__global__ void __launch_bounds__(kThreads) swiglu(Rows k, const T* x, T* out) {
  const int64_t row = Team::row();
  if (row >= k.rows) return;
  const float weight = k.weight(row);
  for_each_pack_of_row<Team>(k.width, [&](int64_t first) {
    Pack gate = k.half(x, row, 0).read(first);
    const Pack up = k.half(x, row, 1).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) gate.at[i] = k.gated(gate.at[i], up.at[i]).value * weight;
    k.of(out, row).write(first, gate);
  });
}

// Both derivatives times dy and the weight, whose gradient is the sum of dy times the values.
template <class Team, class Rows, class T>
__global__ void __launch_bounds__(kThreads) swiglu_backward(Rows k, const T* x, const T* dy, T* dx, float* dweights) {
  const int64_t row = Team::row();
  if (row >= k.rows) return;
  const float weight = k.weight(row);
  float sum = 0.0F;
  for_each_pack_of_row<Team>(k.width, [&](int64_t first) {
    Pack gate = k.half(x, row, 0).read(first), up = k.half(x, row, 1).read(first);
    const Pack d = k.of(dy, row).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const Gated<float> gated = k.gated(gate.at[i], up.at[i]);
      gate.at[i] = d.at[i] * weight * gated.dgate;
      up.at[i] = d.at[i] * weight * gated.dup;
      sum = multiply_add(d.at[i], gated.value, sum);
    }
    k.half(dx, row, 0).write(first, gate);
    k.half(dx, row, 1).write(first, up);
  });
  if (dweights == nullptr) return;
  sum = Team::sum(sum);
  if (Team::rank() == 0) dweights[row] = sum;
}

// Calls body.operator()<Team>(grid, rows) with the GluRows of a kernel.
template <class Kernel, class Body>
void with_glu_rows(const Kernel& k, int64_t rows, int64_t width, const Body& body) {
  with_rows(rows, width, width % kPack == 0, [&]<class Team, bool kWhole>(Grid grid) {
    const auto run = [&]<bool kClamped>() {
      body.template operator()<Team>(
          grid, GluRows<kWhole, kClamped>{rows, width, data_or_null<float>(k.row_weights), static_cast<float>(k.limit)});
    };
    k.limit > 0 ? run.template operator()<true>() : run.template operator()<false>();
  });
}

template <class Form>
struct Gelu {
  __device__ float operator()(float x) const { return Form::template at<FastSigmoid>(x).value; }
};
template <class Form>
struct GeluGradient {
  __device__ float operator()(float x, float dy) const { return dy * Form::template at<FastSigmoid>(x).derivative; }
};

template <class Body>
void with_form(GeluForm form, Body&& body) {
  form == GeluForm::tanh ? body.template operator()<TanhForm>() : body.template operator()<ErfForm>();
}

}  // namespace

void CudaBackend::execute(const SwiGluForward& k) {
  const bool whole = k.out.dim(1) % kPack == 0;
  const Tensor x = whole ? aligned(*this, k.x) : k.x, out = whole ? aligned(*this, k.out, Contents::overwritten) : k.out;
  with_values(x.dtype(), [&]<class T>() {
    with_glu_rows(k, out.dim(0), out.dim(1), [&]<class Team, class Rows>(Grid grid, const Rows& rows) {
      launch(swiglu<Team, Rows, T>, grid, rows, x.device_data<T>(), out.device_data<T>());
    });
  });
  copy_back(*this, out, k.out);
}

void CudaBackend::execute(const SwiGluBackward& k) {
  const bool whole = k.dy.dim(1) % kPack == 0;
  const Tensor x = whole ? aligned(*this, k.x) : k.x, dy = whole ? aligned(*this, k.dy) : k.dy,
               dx = whole ? aligned(*this, k.dx, Contents::overwritten) : k.dx;
  with_values(x.dtype(), [&]<class T>() {
    with_glu_rows(k, dy.dim(0), dy.dim(1), [&]<class Team, class Rows>(Grid grid, const Rows& rows) {
      launch(swiglu_backward<Team, Rows, T>, grid, rows, x.device_data<T>(), dy.device_data<T>(), dx.device_data<T>(),
             data_or_null<float>(k.drow_weights));
    });
  });
  copy_back(*this, dx, k.dx);
}

void CudaBackend::execute(const GeluForward& k) {
  with_form(k.form, [&]<class Form>() {
    with_values(k.x.dtype(), [&]<class T>() {
      launch(map<Gelu<Form>, T, T>, grid_of_map(k.x.elements()), Gelu<Form>(), packs_of<T>(k.out), packs_of<const T>(k.x));
    });
  });
}

void CudaBackend::execute(const GeluBackward& k) {
  with_form(k.form, [&]<class Form>() {
    with_values(k.x.dtype(), [&]<class T>() {
      launch(map<GeluGradient<Form>, T, T, T>, grid_of_map(k.x.elements()), GeluGradient<Form>(), packs_of<T>(k.dx), packs_of<const T>(k.x),
             packs_of<const T>(k.dy));
    });
  });
}

}  // namespace mantissa
