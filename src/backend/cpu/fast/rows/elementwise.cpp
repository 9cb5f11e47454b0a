#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/rows/partial_sums.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/indices.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/scalar.h"
#include "base/parallel.h"

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

namespace {

void gather(const EmbeddingForward& k) {
  const int64_t bytes = k.weight.dim(1) * dtype_bytes(k.weight.dtype()), rows = k.weight.dim(0), first = k.part.first;
  const int32_t* ids = k.ids.device_data<int32_t>();
  const std::byte* weight = k.weight.device_bytes();
  std::byte* out = k.out.device_bytes();
  const auto row_of = [=](int32_t id) {
    const int64_t row = id - first;
    return row >= 0 && row < rows ? weight + row * bytes : nullptr;
  };
  parallel_for(k.ids.dim(0), rows_per_piece(k.weight.dim(1)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const std::byte *row = row_of(ids[i]), *next = row_of(ids[std::min(i + 1, end - 1)]);
      if (next != nullptr) lane::prefetch_row(next, bytes);  // rows anywhere: no hardware foresees them
      if (row == nullptr) {
        std::memset(out + i * bytes, 0, static_cast<size_t>(bytes));
      } else {
        std::memcpy(out + i * bytes, row, static_cast<size_t>(bytes));
      }
    }
  });
}

// A row of dy, and the row of the table that it belongs to. Uses are sorted by table row, then by row of dy, so every table row is summed
// by one thread in the order of the batch.
struct Use {
  int32_t id, row;
  bool operator<(const Use& other) const { return id != other.id ? id < other.id : row < other.row; }
};

template <class T>
struct Scatter {
  const Use* uses;
  int64_t use_count;
  const T* dy;
  float* dweight;
  int64_t channels;
  bool accumulate;
};

template <class T>
[[gnu::always_inline]] inline void add_row(const T* dy, float* row, int64_t channels) {
  simd::for_lanes(
      channels, [&](int64_t j, auto part)
                    __attribute__((always_inline)) { simd::store(row + j, simd::load(row + j, part) + simd::load(dy + j, part), part); });
}

// Sums into table rows [begin, end). Rows that nobody used are written once and not read.
template <class T>
[[gnu::always_inline]] inline void scatter_rows(Scatter<T> k, int64_t begin, int64_t end) {
  const Use* const last = k.uses + k.use_count;
  const Use* use = std::lower_bound(k.uses, last, Use{static_cast<int32_t>(begin), 0});
  if (!k.accumulate) std::memset(k.dweight + begin * k.channels, 0, static_cast<size_t>((end - begin) * k.channels) * sizeof(float));
  for (; use != last && use->id < end; ++use) add_row(k.dy + use->row * k.channels, k.dweight + use->id * k.channels, k.channels);
}

template <class T>
void scatter_parallel(const EmbeddingBackward& k) {
  const int64_t channels = k.dy.dim(1), rows = k.dweight.dim(0);
  const int32_t* ids = k.ids.device_data<int32_t>();
  const auto memory = k.dy.device().allocate(k.ids.dim(0) * static_cast<int64_t>(sizeof(Use)));
  Use* uses = reinterpret_cast<Use*>(memory.get());
  int64_t count = 0;
  for (int64_t i = 0; i < k.ids.dim(0); ++i) {
    const int64_t row = ids[i] - k.part.first;
    if (row >= 0 && row < rows) uses[count++] = {static_cast<int32_t>(row), static_cast<int32_t>(i)};
  }
  std::sort(uses, uses + count);
  const Scatter<T> work{uses, count, k.dy.device_data<T>(), k.dweight.device_data<float>(), channels, k.accumulate};
  parallel_for(rows, rows_per_piece(channels), Subnormals::flushed,
               [&](int64_t begin, int64_t end) { cloned<scatter_rows<T>>(work, begin, end); });
}

}  // namespace

void CpuBackend::execute(const EmbeddingForward& k) {
  check_indices(ExitCode::data, "embedding", "ids", k.ids, k.part.limit(k.weight.dim(0)));
  gather(k);
}

void CpuBackend::execute(const EmbeddingBackward& k) {
  check_indices(ExitCode::data, "embedding backward", "ids", k.ids, k.part.limit(k.dweight.dim(0)));
  k.dy.dtype() == Dtype::f32 ? scatter_parallel<float>(k) : scatter_parallel<bf16>(k);
}

namespace {

template <class T>
struct UnpermuteRows {
  const T* x;
  const int32_t* rows;
  T* out;
  int64_t assignments, columns;
};

template <class T>
[[gnu::always_inline]] inline void unpermute_rows(const UnpermuteRows<T>& k, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const int32_t* rows = k.rows + n * k.assignments;
    T* out = k.out + n * k.columns;
    simd::for_lanes(
        k.columns, [&](int64_t c, auto part) __attribute__((always_inline)) {
          simd::Floats sum = {};
          for (int64_t j = 0; j < k.assignments; ++j) {
            if (rows[j] >= 0) sum += simd::load(k.x + rows[j] * k.columns + c, part);
          }
          simd::store(out + c, sum, part);
        });
  }
}

template <class T>
void unpermute_all(const Unpermute& k) {
  const UnpermuteRows<T> all{.x = k.x.device_data<T>(),
                             .rows = k.rows.device_data<int32_t>(),
                             .out = k.out.device_data<T>(),
                             .assignments = k.rows.dim(1),
                             .columns = k.out.dim(1)};
  parallel_for(k.out.dim(0), rows_per_piece(all.columns * all.assignments), Subnormals::flushed,
               [&](int64_t begin, int64_t end) { cloned<unpermute_rows<T>>(all, begin, end); });
}

}  // namespace

void CpuBackend::execute(const Unpermute& k) {
  check_optional_indices("unpermute", "rows", k.rows, k.x.dim(0));
  k.x.dtype() == Dtype::f32 ? unpermute_all<float>(k) : unpermute_all<bf16>(k);
}

namespace {

using simd::Floats;

struct Update {
  float *master, *m, *v;
  const float* grad;
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay;
  float lr, inverse_bias_correction1, inverse_bias_correction2, clip_factor;
};

Update update_of(const AdamW& k) {
  const float* step = k.step.device_data<float>();
  const auto value = [&](StepValue which) { return step[static_cast<int>(which)]; };
  return {.master = k.master.device_data<float>(),
          .m = k.m.device_data<float>(),
          .v = k.v.device_data<float>(),
          .grad = k.grad.device_data<float>(),
          .beta1 = static_cast<float>(k.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - k.beta1),
          .beta2 = static_cast<float>(k.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - k.beta2),
          .eps = static_cast<float>(k.eps),
          .weight_decay = static_cast<float>(k.weight_decay),
          .lr = value(StepValue::lr),
          .inverse_bias_correction1 = value(StepValue::inverse_bias_correction1),
          .inverse_bias_correction2 = value(StepValue::inverse_bias_correction2),
          .clip_factor = value(StepValue::clip_factor)};
}

// Does the reference's operations in the reference's order, without fma, which gives the same bits. Returns the new master.
template <class Count>
[[gnu::always_inline]] inline Floats step(Update u, int64_t i, Count part) {
  const Floats g = simd::load(u.grad + i, part) * u.clip_factor;
  const Floats m = u.beta1 * simd::load(u.m + i, part) + u.one_minus_beta1 * g;
  const Floats v = u.beta2 * simd::load(u.v + i, part) + u.one_minus_beta2 * g * g;
  const Floats m_hat = m * u.inverse_bias_correction1, v_hat = v * u.inverse_bias_correction2;
  Floats master = simd::load(u.master + i, part);
  const Floats update = m_hat / (simd::sqrt(v_hat) + u.eps) + u.weight_decay * master;
  master -= u.lr * update;
  simd::store(u.m + i, m, part);
  simd::store(u.v + i, v, part);
  simd::store(u.master + i, master, part);
  return master;
}

template <class T>
[[gnu::always_inline]] inline void adamw_range(Update u, T* value, int64_t begin, int64_t end) {
  simd::for_lanes(
      end - begin, [&](int64_t j, auto part) __attribute__((always_inline)) {
        const Floats master = step(u, begin + j, part);
        simd::store(value + begin + j, master, part);
      });
}

[[gnu::always_inline]] inline void adamw_masters(Update u, int64_t begin, int64_t end) {
  simd::for_lanes(
      end - begin, [&](int64_t j, auto part) __attribute__((always_inline)) { step(u, begin + j, part); });
}

template <class T>
void adamw_parallel(const Update& u, int64_t elements, T* value) {
  parallel_for(elements, kPieceElements / 2, [&](int64_t begin, int64_t end) { cloned<adamw_range<T>>(u, value, begin, end); });
}
void adamw_parallel(const Update& u, int64_t elements) {
  parallel_for(elements, kPieceElements / 2, [&](int64_t begin, int64_t end) { cloned<adamw_masters>(u, begin, end); });
}

// Sum of squares of x[0, n), in fp64.
[[gnu::always_inline]] inline double squares_of(const float* x, int64_t n) {
  simd::Doubles sums[4] = {};
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    for (int64_t slot = 0; slot < 4; ++slot) {
      const simd::Doubles value = simd::load_doubles(x + j + 4 * slot);
      sums[slot] += value * value;
    }
  }
  const simd::Doubles lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double total = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  for (; j < n; ++j) total += static_cast<double>(x[j]) * static_cast<double>(x[j]);
  return total;
}

[[gnu::always_inline]] inline void squares(const float* x, int64_t row_block, int64_t elements, double* partials, int64_t begin,
                                           int64_t end) {
  for (int64_t i = begin; i < end; ++i) partials[i] = squares_of(x + i * row_block, std::min(row_block, elements - i * row_block));
}

}  // namespace

void CpuBackend::execute(const AdamW& k) {
  if (k.step.device_data<float>()[static_cast<int>(StepValue::skip)] != 0.0F) return CpuReference::execute(k);
  const Update u = update_of(k);
  const int64_t elements = k.master.elements();
  if (!k.value.defined()) return adamw_parallel(u, elements);
  if (k.value.dtype() == Dtype::bf16) return adamw_parallel(u, elements, k.value.device_data<bf16>());
  adamw_parallel(u, elements, k.value.device_data<float>());
}

void CpuBackend::execute(const SquaredNorm& k) {
  if (k.x.dtype() != Dtype::f32) return CpuReference::execute(k);  // gradients are fp32
  const int64_t row_block = 32 * k.x.shape().with_dim0(1).elements(), elements = k.x.elements();
  const float* x = k.x.device_data<float>();
  double* partials = k.partials.device_data<double>();
  parallel_for(k.partials.dim(0), rows_per_piece(row_block),
               [&](int64_t begin, int64_t end) { cloned<squares>(x, row_block, elements, partials, begin, end); });
}

}  // namespace mantissa
