#include "mantissa/train/device_batch.h"

#include <algorithm>

#include "mantissa/backend/functions.h"

namespace mantissa {

namespace {

struct Range {
  int64_t begin, end;
};

void require_in(Range range, ExitCode code, const char* name, const Batch& batch, const std::vector<int32_t>& values, int64_t i) {
  const int64_t value = values[static_cast<size_t>(i)];
  if (value >= range.begin && value < range.end) return;
  fail(code, "batch: ", name, " [", i / batch.length, ", ", i % batch.length, "] is ", value, ", not in [", range.begin, ", ", range.end,
       ')');
}

void check_indices(const Batch& batch, const ModelConfig& model, int64_t begin, int64_t end) {
  const int64_t vocab = *model.vocab_size;
  for (int64_t i = begin; i < end; ++i) {
    require_in({0, vocab}, ExitCode::data, "token", batch, batch.tokens, i);
    require_in({kNoTarget, vocab}, ExitCode::data, "target", batch, batch.targets, i);
    require_in({0, std::min(batch.length, model.max_position_embeddings)}, ExitCode::internal, "position", batch, batch.positions, i);
    require_in({0, i % batch.length + 1}, ExitCode::internal, "segment start", batch, batch.segment_starts, i);
  }
  for (int64_t row = begin / batch.length; row < end / batch.length && !batch.lengths.empty(); ++row) {
    const int32_t length = batch.lengths[static_cast<size_t>(row)];
    require(length >= 0 && length <= batch.length, "batch: sequence ", row, " has ", length, " tokens of ", batch.length);
  }
}

// Returns the tokens of these rows; none if all of them are full.
std::vector<int32_t> lengths_of(const Batch& batch, int64_t first, int64_t count) {
  if (batch.lengths.empty()) return {};
  const auto begin = batch.lengths.begin() + first, end = begin + count;
  if (std::all_of(begin, end, [&](int32_t length) { return length == batch.length; })) return {};
  return {begin, end};
}

bool has_segments(const Batch& batch, int64_t first, int64_t count) {
  const auto begin = batch.segment_starts.begin() + first * batch.length;
  return std::any_of(begin, begin + count * batch.length, [](int32_t start) { return start != 0; });
}

}  // namespace

DeviceBatch to_device(const Gpt& model, const Batch& batch, int64_t first, int64_t count) {
  require(first >= 0 && count > 0 && first + count <= batch.sequences, "to_device: sequences ", first, " + ", count, " of ",
          batch.sequences);
  check_indices(batch, model.config(), first * batch.length, (first + count) * batch.length);
  const auto upload = [&](const std::vector<int32_t>& values) {
    return from_host(model.device(), Dtype::i32, {count * batch.length}, values.data() + first * batch.length);
  };
  // Without boundaries inside the rows attention takes its simple path.
  const bool segmented = has_segments(batch, first, count);
  return {.tokens = {.batch = count,
                     .tokens = upload(batch.tokens),
                     .positions = upload(batch.positions),
                     .segment_starts = segmented ? upload(batch.segment_starts) : Tensor(),
                     .lengths = lengths_of(batch, first, count)},
          .targets = upload(batch.targets)};
}

}  // namespace mantissa
