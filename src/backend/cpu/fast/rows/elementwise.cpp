#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/rows/partial_sums.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
#include "base/parallel.h"

namespace mantissa {
namespace {

template <class T>
[[gnu::always_inline]] inline void add_range(const T* a, const T* b, T* out, int64_t n) {
  simd::for_lanes(
      n, [&](int64_t j, auto part)
             __attribute__((always_inline)) { simd::store(out + j, simd::load(a + j, part) + simd::load(b + j, part), part); });
}

// Adds what a cache holds of all operands before it goes on.
template <class T>
[[gnu::always_inline]] inline void tree_range(T* own, T* others, int64_t stride, int64_t operands, int64_t place, int64_t n) {
  constexpr int64_t kChunk = 2048;
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t count = std::min(kChunk, n - first);
    const auto operand = [&](int64_t i) { return (i == place ? own : others + (i - (i > place ? 1 : 0)) * stride) + first; };
    for (int64_t distance = 1; distance < operands; distance *= 2) {
      const bool last = 2 * distance >= operands;
      for (int64_t i = 0; i + distance < operands; i += 2 * distance)
        add_range(operand(i), operand(i + distance), last ? own + first : operand(i), count);
    }
  }
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

}  // namespace

void CpuBackend::execute(const Fill& k) {
  if (k.value == 0.0 && !std::signbit(k.value)) {
    std::byte* out = k.out.device_bytes();
    return parallel_for(k.out.bytes(), 4 * kPieceElements,
                        [&](int64_t begin, int64_t end) { std::memset(out + begin, 0, static_cast<size_t>(end - begin)); });
  }
  if (k.out.dtype() != Dtype::f32 && k.out.dtype() != Dtype::bf16) return CpuReference::execute(k);
  with_narrow_values(k.out.dtype(), [&]<class T>() {
    T* out = k.out.device_data<T>();
    parallel_for(k.out.elements(), kPieceElements,
                 [&](int64_t begin, int64_t end) { std::fill(out + begin, out + end, store<T>(k.value)); });
  });
}

void CpuBackend::execute(const Convert& k) {
  if (k.x.dtype() == k.out.dtype()) {
    const std::byte* x = k.x.device_bytes();
    std::byte* out = k.out.device_bytes();
    return parallel_for(k.x.bytes(), 4 * kPieceElements,
                        [&](int64_t begin, int64_t end) { std::memcpy(out + begin, x + begin, static_cast<size_t>(end - begin)); });
  }
  const auto convert = [&]<class From, class To>(const From* x, To* out) {
    parallel_for(k.x.elements(), kPieceElements,
                 [&](int64_t begin, int64_t end) { cloned<simd::convert<From, To>>(x + begin, out + begin, end - begin); });
  };
  k.x.dtype() == Dtype::f32 ? convert(k.x.device_data<float>(), k.out.device_data<bf16>())
                            : convert(k.x.device_data<bf16>(), k.out.device_data<float>());
}

void CpuBackend::execute(const Add& k) {
  with_narrow_values(k.out.dtype(), [&]<class T>() {
    const T *a = k.a.device_data<T>(), *b = k.b.device_data<T>();
    T* out = k.out.device_data<T>();
    parallel_for(k.out.elements(), kPieceElements,
                 [&](int64_t begin, int64_t end) { cloned<add_range<T>>(a + begin, b + begin, out + begin, end - begin); });
  });
}

void CpuBackend::execute(const TreeSum& k) {
  if (k.own.dtype() == Dtype::f64 || k.others.dim(0) == 0) return CpuReference::execute(k);
  with_narrow_values(k.own.dtype(), [&]<class T>() {
    T *own = k.own.device_data<T>(), *others = k.others.device_data<T>();
    const int64_t count = k.own.elements(), operands = k.others.dim(0) + 1;
    parallel_for(count, kPieceElements, [&](int64_t begin, int64_t end) {
      cloned<tree_range<T>>(own + begin, others + begin, count, operands, k.place, end - begin);
    });
  });
}

void CpuBackend::execute(const AddBias& k) {
  with_narrow_values(k.out.dtype(), [&]<class T>() {
    const int64_t columns = k.x.dim(1);
    const float* x = k.x.device_data<float>();
    const T* bias = k.bias.device_data<T>();
    T* out = k.out.device_data<T>();
    parallel_for(k.x.dim(0), rows_per_piece(columns), Subnormals::flushed, [&](int64_t begin, int64_t end) {
      cloned<add_bias_rows<T>>(x + begin * columns, bias, out + begin * columns, columns, end - begin);
    });
  });
}

void CpuBackend::execute(const SumRows& k) {
  const int64_t columns = k.x.dim(1);
  PartialSums sums(k.x.device(), k.x.dim(0), columns, columns);
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    const T* x = k.x.device_data<T>();
    parallel_for(k.x.dim(0), sums.rows_per_piece(), Subnormals::flushed,
                 [&](int64_t begin, int64_t end) { cloned<add_rows<T>>(x, columns, sums.start(begin), begin, end); });
  });
  sums.write(k.out, k.accumulate);
}

void CpuBackend::execute(const EmbeddingForward& k) {
  check_indices(k.ids, IndexRule::below(ExitCode::data, "embedding", "ids", k.part.limit(k.weight.dim(0))));
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

namespace {

// A row of dy, and the row of the table that it belongs to. Uses are sorted by table row, then by row of dy, so every table row is summed
// by one thread in the order of the batch.
struct Use {
  int32_t id, row;
  bool operator<(const Use& other) const { return id != other.id ? id < other.id : row < other.row; }
};

// Sums into table rows [begin, end). Rows that nobody used are written once and not read.
template <class T>
[[gnu::always_inline]] inline void scatter_rows(const EmbeddingBackward& k, const Use* uses, const Use* last, int64_t begin, int64_t end) {
  const int64_t channels = k.dy.dim(1);
  const T* dy = k.dy.device_data<T>();
  float* dweight = k.dweight.device_data<float>();
  if (!k.accumulate) std::memset(dweight + begin * channels, 0, static_cast<size_t>((end - begin) * channels) * sizeof(float));
  for (const Use* use = std::lower_bound(uses, last, Use{static_cast<int32_t>(begin), 0}); use != last && use->id < end; ++use) {
    const T* from = dy + use->row * channels;
    float* to = dweight + use->id * channels;
    simd::for_lanes(
        channels, [&](int64_t j, auto part)
                      __attribute__((always_inline)) { simd::store(to + j, simd::load(to + j, part) + simd::load(from + j, part), part); });
  }
}

}  // namespace

void CpuBackend::execute(const EmbeddingBackward& k) {
  check_indices(k.ids, IndexRule::below(ExitCode::data, "embedding backward", "ids", k.part.limit(k.dweight.dim(0))));
  const int64_t rows = k.dweight.dim(0);
  const int32_t* ids = k.ids.device_data<int32_t>();
  const auto memory = k.dy.device().allocate(k.ids.dim(0) * static_cast<int64_t>(sizeof(Use)));
  Use *const uses = reinterpret_cast<Use*>(memory.get()), *last = uses;
  for (int64_t i = 0; i < k.ids.dim(0); ++i) {
    const int64_t row = ids[i] - k.part.first;
    if (row >= 0 && row < rows) *last++ = {static_cast<int32_t>(row), static_cast<int32_t>(i)};
  }
  std::sort(uses, last);
  with_narrow_values(k.dy.dtype(), [&]<class T>() {
    parallel_for(rows, rows_per_piece(k.dy.dim(1)), Subnormals::flushed,
                 [&](int64_t begin, int64_t end) { cloned<scatter_rows<T>>(k, uses, last, begin, end); });
  });
}

namespace {

template <class T>
[[gnu::always_inline]] inline void unpermute_rows(const Unpermute& k, int64_t begin, int64_t end) {
  const int64_t assignments = k.rows.dim(1), columns = k.out.dim(1);
  const T* x = k.x.device_data<T>();
  const int32_t* rows = k.rows.device_data<int32_t>() + begin * assignments;
  T* out = k.out.device_data<T>() + begin * columns;
  for (int64_t n = begin; n < end; ++n, rows += assignments, out += columns) {
    simd::for_lanes(
        columns, [&](int64_t c, auto part) __attribute__((always_inline)) {
          simd::Floats sum = {};
          for (int64_t j = 0; j < assignments; ++j) {
            if (rows[j] >= 0) sum += simd::load(x + rows[j] * columns + c, part);
          }
          simd::store(out + c, sum, part);
        });
  }
}

}  // namespace

void CpuBackend::execute(const Unpermute& k) {
  check_indices(k.rows, IndexRule::optional("unpermute", "rows", k.x.dim(0)));
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    parallel_for(k.out.dim(0), rows_per_piece(k.out.dim(1) * k.rows.dim(1)), Subnormals::flushed,
                 [&](int64_t begin, int64_t end) { cloned<unpermute_rows<T>>(k, begin, end); });
  });
}

namespace {

// Sums of squares of row blocks [begin, end), in fp64.
[[gnu::always_inline]] inline void squares(const float* x, int64_t row_block, int64_t elements, double* partials, int64_t begin,
                                           int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* of_block = x + i * row_block;
    const int64_t n = std::min(row_block, elements - i * row_block);
    simd::Doubles sums[4] = {};
    int64_t j = 0;
    for (; j + 16 <= n; j += 16) {
      for (int64_t slot = 0; slot < 4; ++slot) {
        const simd::Doubles value = simd::load_doubles(of_block + j + 4 * slot);
        sums[slot] += value * value;
      }
    }
    const simd::Doubles lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double total = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    for (; j < n; ++j) total += static_cast<double>(of_block[j]) * static_cast<double>(of_block[j]);
    partials[i] = total;
  }
}

}  // namespace

void CpuBackend::execute(const SquaredNorm& k) {
  if (k.x.dtype() != Dtype::f32) return CpuReference::execute(k);  // gradients are fp32
  const int64_t row_block = 32 * k.x.shape().with_dim0(1).elements(), elements = k.x.elements();
  const float* x = k.x.device_data<float>();
  double* partials = k.partials.device_data<double>();
  parallel_for(k.partials.dim(0), rows_per_piece(row_block),
               [&](int64_t begin, int64_t end) { cloned<squares>(x, row_block, elements, partials, begin, end); });
}

}  // namespace mantissa
