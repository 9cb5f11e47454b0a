#include "backend/cuda/rows/column_sums.h"

namespace mantissa {
namespace {

using namespace gpu;

// Runs as one block.
__global__ void __launch_bounds__(kThreads) sum(const float* x, int64_t count, double factor, double* out) {
  const double total = sum_in_order(x, count);
  if (thread() == 0) *out = factor * total;
}

// Sums whole numbers, every sum of which fp64 holds, so any order will do.
__global__ void __launch_bounds__(kThreads) sum_counts(const int32_t* counts, int64_t rows, int64_t columns, double* out) {
  for_each_element(columns, [=](int64_t column) {
    int64_t total = 0;
    for (int64_t row = 0; row < rows; ++row) total += counts[row * columns + column];
    out[column] = static_cast<double>(total);
  });
}

}  // namespace

void CudaBackend::execute(const Sum& k) {
  launch(sum, {1, kThreads}, k.x.device_data<float>(), k.x.elements(), k.factor, k.out.device_data<double>());
}

void CudaBackend::execute(const SumRows& k) {
  const int64_t rows = k.x.dim(0), columns = k.x.dim(1);
  with_values(k.x.dtype(), [&]<class T>() {
    const T* const x = k.x.device_data<T>();
    sum_rows(RowTerm<T>{{x, columns, begin_at_packs(columns, x)}}, rows, columns, k.out, k.accumulate);
  });
}

void CudaBackend::execute(const SumCounts& k) {
  const int64_t columns = k.counts.dim(1);
  launch(sum_counts, {blocks_for(columns), kThreads}, k.counts.device_data<int32_t>(), k.counts.dim(0), columns,
         k.out.device_data<double>());
}

}  // namespace mantissa
