// Biases of grouped weights, one row of a group after the other.
#include <algorithm>
#include <vector>

#include "backend/cpu/groups.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

// Calls body(row, group) for all rows of all groups; group is -1 behind the last.
template <class Body>
void for_rows(const char* kernel, const Tensor& offsets, int64_t rows, int64_t columns, const Body& body) {
  const Groups groups(kernel, offsets, rows);
  const int32_t* const begin = offsets.device_data<int32_t>();
  parallel_for(rows, rows_per_piece(columns), [&](int64_t first, int64_t last) {
    int64_t group = std::upper_bound(begin, begin + groups.count() + 1, first) - begin - 1;
    for (int64_t row = first; row < last; ++row) {
      while (group < groups.count() && row >= groups[group].end) ++group;
      body(row, group < groups.count() ? group : -1);
    }
  });
}

template <class T>
void add_bias(const AddGroupedBias& k) {
  using S = Arithmetic<T>;
  const int64_t columns = k.x.dim(1);
  for_rows("add_grouped_bias", k.offsets, k.x.dim(0), columns, [&](int64_t row, int64_t group) {
    const S* x = k.x.device_data<S>() + row * columns;
    T* out = k.out.device_data<T>() + row * columns;
    if (group < 0) {
      for (int64_t c = 0; c < columns; ++c) out[c] = store<T>(x[c]);
      return;
    }
    const T* bias = k.bias.device_data<T>() + group * columns;
    const S weight = k.row_weights.defined() ? k.row_weights.device_data<S>()[row] : S{1};
    for (int64_t c = 0; c < columns; ++c) out[c] = store<T>(x[c] + weight * load(bias[c]));
  });
}

// Sums over rows are fp64, in their order.
template <class T>
void bias_gradient(const GroupedBiasGradient& k) {
  using S = Arithmetic<T>;
  constexpr int64_t kColumns = 64;
  const int64_t columns = k.dy.dim(1), blocks = ceil_div(columns, kColumns);
  const Groups groups("grouped_bias_gradient", k.offsets, k.dy.dim(0));
  parallel_for(groups.count() * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t group = item / blocks, first = item % blocks * kColumns, width = std::min(kColumns, columns - first);
      double sums[kColumns] = {};
      for (int64_t row = groups[group].begin; row < groups[group].end; ++row) {
        const T* dy = k.dy.device_data<T>() + row * columns + first;
        const double weight = k.row_weights.defined() ? static_cast<double>(k.row_weights.device_data<S>()[row]) : 1.0;
        for (int64_t c = 0; c < width; ++c) sums[c] += weight * static_cast<double>(load(dy[c]));
      }
      S* out = k.dbias.device_data<S>() + group * columns + first;
      for (int64_t c = 0; c < width; ++c) out[c] = static_cast<S>(sums[c]) + (k.accumulate ? out[c] : S{0});
    }
  });
}

template <class T>
void bias_dot(const GroupedBiasDot& k) {
  using S = Arithmetic<T>;
  const int64_t columns = k.dy.dim(1);
  for_rows("grouped_bias_dot", k.offsets, k.dy.dim(0), columns, [&](int64_t row, int64_t group) {
    double sum = 0.0;
    const T *dy = k.dy.device_data<T>() + row * columns, *bias = k.bias.device_data<T>() + std::max<int64_t>(0, group) * columns;
    for (int64_t c = 0; c < columns && group >= 0; ++c) sum += static_cast<double>(load(dy[c])) * static_cast<double>(load(bias[c]));
    k.out.device_data<S>()[row] = static_cast<S>(sum);
  });
}

}  // namespace

void CpuReference::execute(const AddGroupedBias& k) {
  with_values(k.out.dtype(), [&]<class T>() { add_bias<T>(k); });
}

void CpuReference::execute(const GroupedBiasGradient& k) {
  with_values(k.dy.dtype(), [&]<class T>() { bias_gradient<T>(k); });
}

void CpuReference::execute(const GroupedBiasDot& k) {
  with_values(k.dy.dtype(), [&]<class T>() { bias_dot<T>(k); });
}

}  // namespace mantissa
