#include <algorithm>

#include "backend/cpu/indices.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"

namespace mantissa {
namespace {

template <class T>
void rotate(const Rope& k) {
  using S = Arithmetic<T>;
  const int64_t d = k.layout.head_dim, half = d / 2, rotated = (k.layout.heads + k.layout.kv_heads) * d, row = k.layout.row();
  for (int64_t i = 0; i < k.x.dim(0); ++i) {
    const T* x = k.x.device_data<T>() + i * row;
    T* y = k.y.device_data<T>() + i * row;
    const float* table = k.table.device_data<float>() + k.positions.device_data<int32_t>()[i] * d;
    for (int64_t head = 0; head < rotated; head += d) {
      for (int64_t j = 0; j < half; ++j) {
        const S cosine = static_cast<S>(table[j]), sine = static_cast<S>(k.inverse ? -table[half + j] : table[half + j]);
        const S first = load(x[head + j]), second = load(x[head + half + j]);
        y[head + j] = store<T>(first * cosine - second * sine);
        y[head + half + j] = store<T>(second * cosine + first * sine);
      }
    }
    std::copy(x + rotated, x + row, y + rotated);
  }
}

}  // namespace

void CpuReference::execute(const Rope& k) {
  check_indices(ExitCode::internal, "rope", "positions", k.positions, k.table.dim(0));
  with_values(k.x.dtype(), [&]<class T>() { rotate<T>(k); });
}

}  // namespace mantissa
