#include <algorithm>
#include <cstring>

#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/lane_math.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/indices.h"
#include "backend/cpu/pieces.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
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

}  // namespace mantissa
