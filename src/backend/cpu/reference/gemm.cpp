#include <algorithm>
#include <vector>

#include "backend/cpu/gemm_operands.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
#include "base/parallel.h"

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
    Gemm widened = k;  // rounded once, at the end, if out is bf16
    widened.a.value = high_precision(k.a.value, wide);
    widened.b.value = high_precision(k.b.value, wide);
    if (k.bias.defined()) widened.bias = converted(k.bias, wide);
    if (k.out.dtype() == Dtype::bf16) widened.out = empty(*this, wide, k.out.shape());
    run(widened);
    if (k.out.dtype() == Dtype::bf16) run(Convert{.x = widened.out, .out = k.out});
    return;
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

Groups::Groups(const char* kernel, const Tensor& offsets, int64_t rows)
    : offsets_(offsets.device_data<int32_t>()), count_(offsets.elements() - 1) {
  const IndexRule rule = IndexRule::each(kernel, "offsets");
  for (int64_t g = 0; g <= count_; ++g) rule.offset(offsets_, g, rows).check(g, offsets_[g]);
}

Value slice(const Value& value, int64_t begin, int64_t end) {
  if (const auto* tensor = std::get_if<Tensor>(&value)) return tensor->slice(begin, end);
  return slice(std::get<QuantizedTensor>(value), begin, end);
}

Tensor high_precision(const Value& value, Dtype dtype, const Tensor& extreme) {
  const auto* quantized = std::get_if<QuantizedTensor>(&value);
  if (!quantized) return converted(std::get<Tensor>(value), dtype);
  Tensor out = empty(quantized->device(), dtype == Dtype::bf16 ? Dtype::bf16 : Dtype::f32, quantized->shape);
  quantized->device().run(Dequantize{.x = *quantized, .out = out, .extreme = extreme});
  return converted(out, dtype);
}

// Runs the plain GEMM group by group.
void CpuReference::execute(const GroupedGemm& k) {
  const Groups groups("grouped_gemm", k.offsets, k.out.dim(0));
  const int64_t matrix = shape_of(k.b.value)[0] / groups.count();
  for (int64_t g = 0; g < groups.count(); ++g) {
    const auto [begin, end] = groups[g];
    if (begin == end) continue;
    run(Gemm{.a = {slice(k.a.value, begin, end)},
             .b = {slice(k.b.value, g * matrix, (g + 1) * matrix), k.b.transposed},
             .out = k.out.slice(begin, end),
             .accumulate = false});
  }
  run(Fill{.out = k.out.slice(groups.end(), k.out.dim(0)), .value = 0.0});
}

void CpuReference::execute(const GroupedWeightGradient& k) {
  const Groups groups("grouped_weight_gradient", k.offsets, shape_of(k.a)[0]);
  const int64_t matrix = shape_of(k.a)[1];
  for (int64_t g = 0; g < groups.count(); ++g) {
    const auto [begin, end] = groups[g];
    const Tensor out = k.out.slice(g * matrix, (g + 1) * matrix);
    if (begin < end) {
      run(Gemm{.a = {slice(k.a, begin, end), true}, .b = {slice(k.b, begin, end)}, .out = out, .accumulate = k.accumulate});
    } else if (!k.accumulate) {
      run(Fill{.out = out, .value = 0.0});
    }
  }
}

namespace {

// Biases of grouped weights, one row of a group after the other.

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

}  // namespace

void CpuReference::execute(const AddGroupedBias& k) {
  with_values(k.out.dtype(), [&]<class T>() {
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
  });
}

// Sums over rows are fp64, in their order.
void CpuReference::execute(const GroupedBiasGradient& k) {
  static constexpr int64_t kColumns = 64;
  with_values(k.dy.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
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
  });
}

void CpuReference::execute(const GroupedBiasDot& k) {
  with_values(k.dy.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t columns = k.dy.dim(1);
    for_rows("grouped_bias_dot", k.offsets, k.dy.dim(0), columns, [&](int64_t row, int64_t group) {
      double sum = 0.0;
      const T *dy = k.dy.device_data<T>() + row * columns, *bias = k.bias.device_data<T>() + std::max<int64_t>(0, group) * columns;
      for (int64_t c = 0; c < columns && group >= 0; ++c) sum += static_cast<double>(load(dy[c])) * static_cast<double>(load(bias[c]));
      k.out.device_data<S>()[row] = static_cast<S>(sum);
    });
  });
}

}  // namespace mantissa
