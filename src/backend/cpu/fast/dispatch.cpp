#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/indices.h"
#include "backend/cpu/pieces.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
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

}  // namespace mantissa
