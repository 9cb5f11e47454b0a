#include "backend/activation_rule.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"

namespace mantissa {
namespace {

using namespace gpu;

// Rows of gates, and of what they let through behind them, `width` each.
struct GluRows {
  int64_t rows, width;
  const float* weights;  // one for each row; null: ones
  float limit;
  bool aligned;

  __device__ float weight(int64_t row) const { return weights != nullptr ? weights[row] : 1.0F; }
  template <class T>
  __device__ Packs<T> half(T* x, int64_t row, int64_t which) const {
    return {x + (2 * row + which) * width, width, aligned};
  }
  template <class T>
  __device__ Packs<T> of(T* y, int64_t row) const {
    return {y + row * width, width, aligned};
  }
};

template <class Team, class T>
__global__ void __launch_bounds__(kThreads) swiglu(GluRows k, const T* x, T* out) {
  const int64_t row = Team::row();
  if (row >= k.rows) return;
  const float weight = k.weight(row);
  for_each_pack_of_row<Team>(k.width, [&](int64_t first) {
    Pack gate = k.half(x, row, 0).read(first);
    const Pack up = k.half(x, row, 1).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) gate.at[i] = glu(gate.at[i], up.at[i], k.limit).value * weight;
    k.of(out, row).write(first, gate);
  });
}

// Both derivatives times dy and the weight, whose gradient is the sum of dy times the values.
template <class Team, class T>
__global__ void __launch_bounds__(kThreads) swiglu_backward(GluRows k, const T* x, const T* dy, T* dx, float* dweights) {
  const int64_t row = Team::row();
  if (row >= k.rows) return;
  const float weight = k.weight(row);
  float sum = 0.0F;
  for_each_pack_of_row<Team>(k.width, [&](int64_t first) {
    Pack gate = k.half(x, row, 0).read(first), up = k.half(x, row, 1).read(first);
    const Pack d = k.of(dy, row).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const Gated<float> gated = glu(gate.at[i], up.at[i], k.limit);
      gate.at[i] = d.at[i] * weight * gated.dgate;
      up.at[i] = d.at[i] * weight * gated.dup;
      sum += d.at[i] * gated.value;
    }
    k.half(dx, row, 0).write(first, gate);
    k.half(dx, row, 1).write(first, up);
  });
  if (dweights == nullptr) return;
  sum = Team::sum(sum);
  if (Team::rank() == 0) dweights[row] = sum;
}

template <class Form, class T>
__global__ void __launch_bounds__(kThreads) gelu(Packs<const T> x, Packs<T> out) {
  for_each_pack(x.count, [=](int64_t first) {
    Pack pack = x.read(first);
    for (float& value : pack.at) value = Form::at(value).value;
    out.write(first, pack);
  });
}

template <class Form, class T>
__global__ void __launch_bounds__(kThreads) gelu_backward(Packs<const T> x, Packs<const T> dy, Packs<T> dx) {
  for_each_pack(x.count, [=](int64_t first) {
    Pack out = dy.read(first);
    const Pack at = x.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] *= Form::at(at.at[i]).derivative;
    dx.write(first, out);
  });
}

template <class Body>
void with_form(GeluForm form, Body&& body) {
  form == GeluForm::tanh ? body.template operator()<TanhForm>() : body.template operator()<ErfForm>();
}

}  // namespace

void CudaBackend::execute(const SwiGluForward& k) {
  const int64_t rows = k.out.dim(0), width = k.out.dim(1);
  with_values(k.x.dtype(), [&]<class T>() {
    const T* const x = k.x.device_data<T>();
    T* const out = k.out.device_data<T>();
    const GluRows all{rows, width, data_or_null<float>(k.row_weights), static_cast<float>(k.limit), begin_at_packs(width, x, out)};
    with_team(rows, width, [&]<class Team>(Grid grid) { launch(swiglu<Team, T>, grid, all, x, out); });
  });
}

void CudaBackend::execute(const SwiGluBackward& k) {
  const int64_t rows = k.dy.dim(0), width = k.dy.dim(1);
  with_values(k.x.dtype(), [&]<class T>() {
    const T *const x = k.x.device_data<T>(), *const dy = k.dy.device_data<T>();
    T* const dx = k.dx.device_data<T>();
    const GluRows all{rows, width, data_or_null<float>(k.row_weights), static_cast<float>(k.limit), begin_at_packs(width, x, dy, dx)};
    with_team(rows, width,
              [&]<class Team>(Grid grid) { launch(swiglu_backward<Team, T>, grid, all, x, dy, dx, data_or_null<float>(k.drow_weights)); });
  });
}

void CudaBackend::execute(const GeluForward& k) {
  with_form(k.form, [&]<class Form>() {
    with_values(k.x.dtype(), [&]<class T>() {
      launch(gelu<Form, T>, {blocks_for_packs(k.x.elements()), kThreads}, packs_of<const T>(k.x), packs_of<T>(k.out));
    });
  });
}

void CudaBackend::execute(const GeluBackward& k) {
  with_form(k.form, [&]<class Form>() {
    with_values(k.x.dtype(), [&]<class T>() {
      launch(gelu_backward<Form, T>, {blocks_for_packs(k.x.elements()), kThreads}, packs_of<const T>(k.x), packs_of<const T>(k.dy),
             packs_of<T>(k.dx));
    });
  });
}

}  // namespace mantissa
