#include <algorithm>

#include "backend/cpu/indices.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"

namespace mantissa {
namespace {

template <class T>
void forward(const EmbeddingForward& k) {
  const int64_t channels = k.weight.dim(1);
  const int32_t* ids = k.ids.device_data<int32_t>();
  const T* weight = k.weight.device_data<T>();
  T* out = k.out.device_data<T>();
  for (int64_t i = 0; i < k.ids.dim(0); ++i) {
    const int64_t row = ids[i] - k.part.first;
    if (row >= 0 && row < k.weight.dim(0)) {
      std::copy_n(weight + row * channels, channels, out + i * channels);
    } else {
      std::fill_n(out + i * channels, channels, T{});
    }
  }
}

template <class T>
void backward(const EmbeddingBackward& k) {
  using S = Arithmetic<T>;
  const int64_t channels = k.dy.dim(1);
  const int32_t* ids = k.ids.device_data<int32_t>();
  const T* dy = k.dy.device_data<T>();
  S* dweight = k.dweight.device_data<S>();
  if (!k.accumulate) std::fill_n(dweight, k.dweight.elements(), S{0});
  for (int64_t i = 0; i < k.ids.dim(0); ++i) {
    const int64_t row = ids[i] - k.part.first;
    if (row < 0 || row >= k.dweight.dim(0)) continue;
    for (int64_t j = 0; j < channels; ++j) dweight[row * channels + j] += load(dy[i * channels + j]);
  }
}

}  // namespace

void CpuReference::execute(const EmbeddingForward& k) {
  check_indices(ExitCode::data, "embedding", "ids", k.ids, k.part.limit(k.weight.dim(0)));
  with_values(k.weight.dtype(), [&]<class T>() { forward<T>(k); });
}

void CpuReference::execute(const EmbeddingBackward& k) {
  check_indices(ExitCode::data, "embedding backward", "ids", k.ids, k.part.limit(k.dweight.dim(0)));
  with_values(k.dy.dtype(), [&]<class T>() { backward<T>(k); });
}

}  // namespace mantissa
