#include <algorithm>
#include <vector>

#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "backend/cpu/widened_gemm.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

// op(matrix) [rows, columns], row-major and widened.
template <class T>
std::vector<Arithmetic<T>> packed(const Operand& operand, int64_t rows, int64_t columns) {
  std::vector<Arithmetic<T>> out(static_cast<size_t>(rows * columns));
  const T* x = operand.dense().device_data<T>();
  const int64_t row_step = operand.transposed ? 1 : columns, column_step = operand.transposed ? rows : 1;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) out[static_cast<size_t>(i * columns + j)] = load(x[i * row_step + j * column_step]);
  }
  return out;
}

// Every element is one sum over k in ascending order; the rows of b are read in the middle loop so that the inner one is contiguous.
template <class S>
void multiply(const S* a, const S* b, S* sums, int64_t rows, int64_t inner, int64_t columns) {
  for (int64_t k = 0; k < inner; ++k) {
    for (int64_t i = 0; i < rows; ++i) {
      const S factor = a[i * inner + k];
      for (int64_t j = 0; j < columns; ++j) sums[i * columns + j] += factor * b[k * columns + j];
    }
  }
}

template <class T, class Out>
void gemm(const Gemm& k) {
  using S = Arithmetic<T>;
  const int64_t rows = k.out.dim(0), columns = k.out.dim(1), inner = k.a.cols();
  const std::vector<S> a = packed<T>(k.a, rows, inner), b = packed<T>(k.b, inner, columns);
  const T* bias = k.bias.defined() ? k.bias.device_data<T>() : nullptr;
  Out* out = k.out.device_data<Out>();
  parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    std::vector<S> sums(static_cast<size_t>((end - begin) * columns), S{0});
    multiply(a.data() + begin * inner, b.data(), sums.data(), end - begin, inner, columns);
    for (int64_t i = 0; i < (end - begin) * columns; ++i) {
      S value = sums[static_cast<size_t>(i)];
      if (bias != nullptr) value += load(bias[i % columns]);
      Out& target = out[begin * columns + i];
      target = store<Out>(k.accumulate ? load(target) + value : value);
    }
  });
}

}  // namespace

void CpuReference::execute(const Gemm& k) {
  if (k.a.quantized() || k.b.quantized()) {
    const Dtype wide = k.out.dtype() == Dtype::f64 ? Dtype::f64 : Dtype::f32;
    return multiply_widened(*this, k, wide, [&](Gemm widened) {
      widened.a.value = high_precision(k.a.value, wide);
      widened.b.value = high_precision(k.b.value, wide);
      run(widened);
    });
  }
  const Dtype dtype = k.a.dense().dtype();
  with_values(dtype, [&]<class T>() {
    if (k.out.dtype() == dtype) return gemm<T, T>(k);
    gemm<T, Arithmetic<T>>(k);
  });
}

void CpuReference::execute(const SumRows& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t rows = k.x.dim(0), columns = k.x.dim(1);
    const T* x = k.x.device_data<T>();
    S* out = k.out.device_data<S>();
    for (int64_t j = 0; j < columns; ++j) {
      S sum = 0;
      for (int64_t i = 0; i < rows; ++i) sum += load(x[i * columns + j]);
      out[j] = k.accumulate ? out[j] + sum : sum;
    }
  });
}

}  // namespace mantissa
