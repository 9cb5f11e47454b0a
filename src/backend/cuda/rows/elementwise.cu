#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"

namespace mantissa {
namespace {

using namespace gpu;

template <class T>
__global__ void __launch_bounds__(kThreads) fill(T* out, T value, int64_t count) {
  for_each_element(count, [=](int64_t i) { out[i] = value; });
}

struct Same {
  __device__ float operator()(float x) const { return x; }
};

// Operands of a TreeSum: the rows of `others` with `own` among them.
template <class T>
struct Leaves {
  T *own, *others;
  int64_t place, count, elements;

  __device__ Packs<T> at(int64_t i, bool aligned) const {
    return {i == place ? own : others + (i - (i > place ? 1 : 0)) * elements, elements, aligned};
  }
};
inline constexpr int64_t kLeaves = 8;  // operands that a thread reads before it adds

// Sums the operands first, first + apart, ... to the first of them, or to own if they are `all` that is left.
template <class T>
__global__ void __launch_bounds__(kThreads) tree_sum(Leaves<T> k, int64_t first, int64_t apart, bool all, bool aligned) {
  for_each_pack(k.elements, [=](int64_t at) {
    Pack sums[kLeaves];
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kLeaves; ++i) {
      if (first + i * apart < k.count) sums[i] = k.at(first + i * apart, aligned).read(at);
    }
    MANTISSA_UNROLL
    for (unsigned distance = 1; distance < kLeaves; distance *= 2) {
      MANTISSA_UNROLL
      for (unsigned i = 0; i + distance < kLeaves; i += 2 * distance) {
        if (first + (i + distance) * apart >= k.count) continue;
        MANTISSA_UNROLL
        for (unsigned j = 0; j < kPack; ++j) sums[i].at[j] = value_of(rounded<T>(sums[i].at[j] + sums[i + distance].at[j]));
      }
    }
    k.at(all ? k.place : first, aligned).write(at, sums[0]);
  });
}

template <class Team, class T>
__global__ void __launch_bounds__(kThreads) add_bias(Packs<const float> x, Packs<const T> bias, Packs<T> out, int64_t rows) {
  const int64_t row = Team::row();
  if (row >= rows) return;
  for_each_pack_of_row<Team>(bias.count, [=](int64_t first) {
    Pack sum = x.row(row).read(first);
    const Pack own = bias.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) sum.at[i] += own.at[i];
    out.row(row).write(first, sum);
  });
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
  if (k.x.dtype() == k.out.dtype()) return copy(k.x, k.out);
  with_values(k.x.dtype(), [&]<class From>() {
    with_values(k.out.dtype(), [&]<class To>() {
      launch(map<Same, To, From>, grid_of_map(k.x.elements()), Same(), packs_of<To>(k.out), packs_of<const From>(k.x));
    });
  });
}

void CudaBackend::execute(const Add& k) {
  with_values(k.out.dtype(), [&]<class T>() {
    launch(map<Plus<float>, T, T, T>, grid_of_map(k.out.elements()), Plus<float>(), packs_of<T>(k.out), packs_of<const T>(k.a),
           packs_of<const T>(k.b));
  });
}

void CudaBackend::execute(const TreeSum& k) {
  with_values(k.own.dtype(), [&]<class T>() {
    const Leaves<T> leaves{k.own.device_data<T>(), k.others.device_data<T>(), k.place, k.others.dim(0) + 1, k.own.elements()};
    const bool aligned = begin_at_packs(leaves.elements, leaves.own, leaves.others);
    const Grid grid{blocks_for_packs(leaves.elements), kThreads};
    for (int64_t apart = 1; apart < leaves.count; apart *= kLeaves) {
      const bool all = apart * kLeaves >= leaves.count;
      for (int64_t first = 0; first < leaves.count; first += apart * kLeaves) launch(tree_sum<T>, grid, leaves, first, apart, all, aligned);
    }
  });
}

void CudaBackend::execute(const AddBias& k) {
  const int64_t rows = k.out.dim(0), columns = k.out.dim(1);
  with_values(k.out.dtype(), [&]<class T>() {
    const float* const x = k.x.device_data<float>();
    const T* const bias = k.bias.device_data<T>();
    T* const out = k.out.device_data<T>();
    const RowPacks of{columns, begin_at_packs(columns, x, bias, out)};
    with_team(rows, columns, [&]<class Team>(Grid grid) { launch(add_bias<Team, T>, grid, of(x), of(bias), of(out), rows); });
  });
}

}  // namespace mantissa
