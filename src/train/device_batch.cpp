#include "mantissa/train/device_batch.h"

#include <algorithm>

#include "mantissa/backend/functions.h"

namespace mantissa {

DeviceBatch to_device(Backend& device, const Batch& batch, int64_t first, int64_t count) {
  require(first >= 0 && count > 0 && first + count <= batch.sequences, "to_device: sequences ", first, " + ", count, " of ",
          batch.sequences);
  const auto upload = [&](const std::vector<int32_t>& values) {
    return from_host(device, Dtype::i32, {count * batch.length}, values.data() + first * batch.length);
  };
  const auto begin = batch.segment_starts.begin() + first * batch.length;
  // Without boundaries inside the rows attention takes its simple path.
  const bool segmented = std::any_of(begin, begin + count * batch.length, [](int32_t start) { return start != 0; });
  return {.tokens = {.batch = count,
                     .tokens = upload(batch.tokens),
                     .positions = upload(batch.positions),
                     .segment_starts = segmented ? upload(batch.segment_starts) : Tensor()},
          .targets = upload(batch.targets)};
}

}  // namespace mantissa
