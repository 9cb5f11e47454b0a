// Checks indices before the kernels that use them, which have an order of their own.
#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/values.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// Runs as one block. checked = offsets, or, where one is refused, zeros, i.e. groups without rows.
__global__ void __launch_bounds__(kThreads)
    check_offsets(const int32_t* offsets, int64_t count, int64_t rows, IndexRule rule, ErrorWord* error, int32_t* checked) {
  const int64_t bad = first_bad(count, [=](int64_t g) { return !rule.offset(offsets, g, rows).allows(offsets[g]); });
  if (bad < count && thread() == 0) allowed(error, rule.offset(offsets, bad, rows), bad, offsets[bad]);
  for (int64_t g = thread(); g < count; g += kThreads) checked[g] = bad < count ? 0 : offsets[g];
}

__global__ void __launch_bounds__(kThreads)
    check_starts(const int32_t* starts, int64_t count, int64_t length, IndexRule rule, ErrorWord* error) {
  for_each_element(count, [=](int64_t i) { allowed(error, rule.within(0, i % length), i, starts[i]); });
}

}  // namespace

Tensor CudaBackend::checked_offsets(const char* kernel, const Tensor& offsets, int64_t rows) {
  const Tensor checked = empty(*this, Dtype::i32, offsets.shape());
  launch(check_offsets, {1, kThreads}, offsets.device_data<int32_t>(), offsets.elements(), rows, IndexRule::each(kernel, "offsets"),
         error_word(), checked.device_data<int32_t>());
  return checked;
}

void CudaBackend::check_segment_starts(const char* kernel, const Tensor& starts, int64_t length) {
  if (!starts.defined()) return;
  launch(check_starts, {blocks_for(starts.elements()), kThreads}, starts.device_data<int32_t>(), starts.elements(), length,
         IndexRule::each(kernel, "segment_starts"), error_word());
}

}  // namespace mantissa
