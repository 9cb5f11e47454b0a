#include <cmath>
#include <cstring>

#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/partial_sums.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/scalar.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

template <class From, class To>
void convert_parallel(const Convert& k) {
  const From* x = k.x.device_data<From>();
  To* out = k.out.device_data<To>();
  parallel_for(k.x.elements(), kPieceElements,
               [&](int64_t begin, int64_t end) { cloned<simd::convert<From, To>>(x + begin, out + begin, end - begin); });
}

void copy_parallel(const std::byte* from, std::byte* to, int64_t bytes) {
  parallel_for(bytes, 4 * kPieceElements,
               [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin)); });
}

template <class T>
[[gnu::always_inline]] inline void add_range(const T* a, const T* b, T* out, int64_t n) {
  simd::for_lanes(
      n, [&](int64_t j, auto part)
             __attribute__((always_inline)) { simd::store(out + j, simd::load(a + j, part) + simd::load(b + j, part), part); });
}

template <class T>
void add_parallel(const Add& k) {
  const T *a = k.a.device_data<T>(), *b = k.b.device_data<T>();
  T* out = k.out.device_data<T>();
  parallel_for(k.out.elements(), kPieceElements,
               [&](int64_t begin, int64_t end) { cloned<add_range<T>>(a + begin, b + begin, out + begin, end - begin); });
}

template <class T>
[[gnu::always_inline]] inline void add_bias_rows(const float* x, const T* bias, T* out, int64_t columns, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* from = x + i * columns;
    T* to = out + i * columns;
    simd::for_lanes(
        columns, [&](int64_t j, auto part) __attribute__((always_inline)) {
          simd::store(to + j, simd::load(from + j, part) + simd::load(bias + j, part), part);
        });
  }
}

template <class T>
void add_bias_parallel(const AddBias& k) {
  const int64_t columns = k.x.dim(1);
  const float* x = k.x.device_data<float>();
  const T* bias = k.bias.device_data<T>();
  T* out = k.out.device_data<T>();
  parallel_for(k.x.dim(0), rows_per_piece(columns), Subnormals::flushed, [&](int64_t begin, int64_t end) {
    cloned<add_bias_rows<T>>(x + begin * columns, bias, out + begin * columns, columns, end - begin);
  });
}

template <class T>
void fill_parallel(const Tensor& tensor, T value) {
  T* out = tensor.device_data<T>();
  parallel_for(tensor.elements(), kPieceElements, [&](int64_t begin, int64_t end) { std::fill(out + begin, out + end, value); });
}

void clear_parallel(const Tensor& tensor) {
  std::byte* out = tensor.device_bytes();
  parallel_for(tensor.bytes(), 4 * kPieceElements,
               [&](int64_t begin, int64_t end) { std::memset(out + begin, 0, static_cast<size_t>(end - begin)); });
}

// Adds four rows in one pass over the sums.
template <class T>
[[gnu::always_inline]] inline void add_rows(const T* x, int64_t columns, float* sums, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + 4 <= end; i += 4) {
    const T *x0 = x + i * columns, *x1 = x0 + columns, *x2 = x1 + columns, *x3 = x2 + columns;
    simd::for_lanes(
        columns, [&](int64_t j, auto part) __attribute__((always_inline)) {
          const simd::Floats four =
              (simd::load(x0 + j, part) + simd::load(x1 + j, part)) + (simd::load(x2 + j, part) + simd::load(x3 + j, part));
          simd::store(sums + j, simd::load(sums + j, part) + four, part);
        });
  }
  for (; i < end; ++i) {
    simd::for_lanes(
        columns, [&](int64_t j, auto part) __attribute__((always_inline)) {
          simd::store(sums + j, simd::load(sums + j, part) + simd::load(x + i * columns + j, part), part);
        });
  }
}

template <class T>
void sum_rows(const SumRows& k) {
  const int64_t columns = k.x.dim(1);
  const T* x = k.x.device_data<T>();
  PartialSums sums(k.x.device(), k.x.dim(0), columns, columns);
  parallel_for(k.x.dim(0), sums.rows_per_piece(), Subnormals::flushed,
               [&](int64_t begin, int64_t end) { cloned<add_rows<T>>(x, columns, sums.start(begin), begin, end); });
  sums.write(k.out, k.accumulate);
}

}  // namespace

void CpuBackend::execute(const Fill& k) {
  if (k.value == 0.0 && !std::signbit(k.value)) return clear_parallel(k.out);
  switch (k.out.dtype()) {
    case Dtype::f32: return fill_parallel(k.out, static_cast<float>(k.value));
    case Dtype::bf16: return fill_parallel(k.out, store<bf16>(k.value));
    default: return CpuReference::execute(k);
  }
}

void CpuBackend::execute(const Convert& k) {
  if (k.x.dtype() == k.out.dtype()) return copy_parallel(k.x.device_bytes(), k.out.device_bytes(), k.x.bytes());
  k.x.dtype() == Dtype::f32 ? convert_parallel<float, bf16>(k) : convert_parallel<bf16, float>(k);
}

void CpuBackend::execute(const Add& k) { k.out.dtype() == Dtype::f32 ? add_parallel<float>(k) : add_parallel<bf16>(k); }

void CpuBackend::execute(const AddBias& k) { k.out.dtype() == Dtype::f32 ? add_bias_parallel<float>(k) : add_bias_parallel<bf16>(k); }

void CpuBackend::execute(const SumRows& k) { k.x.dtype() == Dtype::f32 ? sum_rows<float>(k) : sum_rows<bf16>(k); }

}  // namespace mantissa
