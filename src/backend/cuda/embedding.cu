#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/values.h"

namespace mantissa {
namespace {

using namespace gpu;

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

// Which of the ids that a block has looked at are those of its row, a bit each. Of two turns, because the first warp to go on looks at
// more ids while others still read.
struct UsesOfRow {
  unsigned of_warps[2][kWarpsOfBlock];
};

// A block has a row of the table and finds its ids by votes. A thread adds to columns of its own, in the order of ids.
template <class T>
__global__ void __launch_bounds__(kThreads) scatter(Ids k, int64_t count, const T* dy, float* dweight, int64_t channels, bool accumulate) {
  auto& found = block_shared<UsesOfRow>().of_warps;
  float* const sums = dweight + block() * channels;
  for (int64_t j = thread(); j < channels && !accumulate; j += kThreads) sums[j] = 0.0F;
  unsigned turn = 0;
  for (int64_t start = 0; start < count; start += kThreads, turn = 1 - turn) {
    const int64_t i = start + thread();
    if (block() == 0 && i < count) checked(k.ids, i);
    const unsigned own = ballot(i < count && k.row(i) == block());
    if (lane() == 0) found[turn][warp()] = own;
    barrier();
    unsigned any = 0;
    for (const unsigned uses : found[turn]) any |= uses;
    for (int64_t j = thread(); j < channels && any != 0; j += kThreads) {
      float sum = sums[j];
      for (unsigned w = 0; w < kWarpsOfBlock; ++w) {
        for (unsigned uses = found[turn][w]; uses != 0; uses &= uses - 1)
          sum += value_of(dy[(start + w * kWarp + lowest_bit(uses)) * channels + j]);
      }
      sums[j] = sum;
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
    launch(scatter<T>, {rows, kThreads}, ids, k.ids.dim(0), k.dy.device_data<T>(), k.dweight.device_data<float>(), k.dy.dim(1),
           k.accumulate);
  });
}

}  // namespace mantissa
