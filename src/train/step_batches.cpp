#include "train/step_batches.h"

#include <utility>

#include "mantissa/base/trace.h"

namespace mantissa {

StepBatch StepBatches::take(int64_t first) {
  std::optional<Prefetched> next = std::exchange(next_, {});
  if (!next || next->first != first) return {.rows = data_.batch(first, sizes_.sequences)};
  if (next->error) std::rethrow_exception(next->error);
  return std::move(next->batch);
}

void StepBatches::prefetch(int64_t first) noexcept {
  const TraceSpan span(Track::compute, "next batch");
  Prefetched& next = next_.emplace(Prefetched{.first = first});
  try {
    next.batch.rows = data_.batch(first, sizes_.sequences);
    for (int64_t i = 0; i < sizes_.sequences; i += sizes_.micro_batch_size)
      next.batch.uploaded.push_back(to_device(model_, next.batch.rows, i, sizes_.micro_batch_size));
  } catch (...) {
    next.error = std::current_exception();
  }
}

}  // namespace mantissa
