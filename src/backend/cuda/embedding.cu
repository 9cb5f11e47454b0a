#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/values.h"

namespace mantissa {
namespace {

using namespace gpu;

constexpr unsigned kWarpsOfBlock = kThreads / kWarp;

// Ids of a batch, and which rows of the table an operand has.
struct Ids {
  CheckedIndices ids;
  int64_t first, rows;

  __device__ int64_t row(int64_t i) const { return ids.values[i] - first; }  // may be outside [0, rows)
};

// A block has a row of out.
template <class T>
__global__ void __launch_bounds__(kThreads) gather(Ids k, const T* weight, T* out, int64_t channels) {
  const int64_t row = checked(k.ids, block()) < 0 ? -1 : k.row(block());
  const bool here = row >= 0 && row < k.rows;
  for (int64_t j = thread(); j < channels; j += kThreads) out[block() * channels + j] = here ? weight[row * channels + j] : T{};
}

// A warp has a row of the table and finds its ids by votes. A lane adds to columns of its own, so that nothing is handed over.
template <class T>
__global__ void __launch_bounds__(kThreads) scatter(Ids k, int64_t count, const T* dy, float* dweight, int64_t channels, bool accumulate) {
  const int64_t own = block() * kWarpsOfBlock + warp();
  if (own >= k.rows) return;
  float* const sums = dweight + own * channels;
  for (int64_t j = lane(); j < channels && !accumulate; j += kWarp) sums[j] = 0.0F;
  for (int64_t start = 0; start < count; start += kWarp) {
    const int64_t i = start + lane();
    if (own == 0 && i < count) checked(k.ids, i);
    for (unsigned uses = ballot(i < count && k.row(i) == own); uses != 0; uses &= uses - 1) {
      const T* from = dy + (start + lowest_bit(uses)) * channels;
      for (int64_t j = lane(); j < channels; j += kWarp) sums[j] += value_of(from[j]);
    }
  }
}

}  // namespace

void CudaBackend::execute(const EmbeddingForward& k) {
  const int64_t rows = k.weight.dim(0);
  const Ids ids{checked(k.ids, IndexRule::below(ExitCode::data, "embedding", "ids", k.part.limit(rows))), k.part.first, rows};
  with_values(k.weight.dtype(), [&]<class T>() {
    launch(gather<T>, {k.ids.dim(0), kThreads}, ids, k.weight.device_data<T>(), k.out.device_data<T>(), k.weight.dim(1));
  });
}

void CudaBackend::execute(const EmbeddingBackward& k) {
  const int64_t rows = k.dweight.dim(0);
  const Ids ids{checked(k.ids, IndexRule::below(ExitCode::data, "embedding backward", "ids", k.part.limit(rows))), k.part.first, rows};
  with_values(k.dy.dtype(), [&]<class T>() {
    launch(scatter<T>, {ceil_div(rows, int64_t{kWarpsOfBlock}), kThreads}, ids, k.ids.dim(0), k.dy.device_data<T>(),
           k.dweight.device_data<float>(), k.dy.dim(1), k.accumulate);
  });
}

}  // namespace mantissa
