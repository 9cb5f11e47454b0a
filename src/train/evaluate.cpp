#include "train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "comm/mesh.h"
#include "mantissa/backend/functions.h"
#include "train/training_step.h"

namespace mantissa {

int64_t windows_to_read(const ValidationData& data, int set, int64_t micro_batch_size, std::optional<int64_t> iters) {
  const int64_t windows = data.windows(set);
  return iters && *iters <= windows / micro_batch_size ? *iters * micro_batch_size : windows;
}

int64_t evaluated_windows(const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters) {
  int64_t windows = 0;
  for (int set = 0; set < data.sets(); ++set) windows += windows_to_read(data, set, micro_batch_size, iters);
  return windows;
}

void require_targets(const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters) {
  for (int set = 0; set < data.sets(); ++set) {
    const int64_t windows = windows_to_read(data, set, micro_batch_size, iters);
    for (int64_t window = 0; window < windows; ++window) {
      if (data.batch(set, window, 1).target_count > 0) return;
    }
  }
  fail(ExitCode::usage, "evaluation: all targets of the validation data are masked");
}

Evaluation evaluate(Gpt& model, const ValidationData& data, int64_t micro_batch_size, std::optional<int64_t> iters,
                    const std::function<bool()>& stop, const Communicator& ranks, Gpt* teacher) {
  const Tape::Scope paused(nullptr);
  require_targets(data, micro_batch_size, iters);
  struct Partial {
    double loss = 0.0, divergence = 0.0;
    int64_t targets = 0;
  };
  Evaluation result;
  double divergence = 0.0;
  for (int set = 0; set < data.sets(); ++set) {
    SetLoss sum{.name = data.name(set)};  // in the order of the windows
    const int64_t windows = windows_to_read(data, set, micro_batch_size, iters);
    for (int64_t first = 0; first < windows; first += micro_batch_size * ranks.size()) {
      if (stop && stop()) return {.stopped = true};
      const int64_t own = first + micro_batch_size * ranks.rank();
      Batch batch;
      agree(ranks, [&] {
        if (own < windows) batch = data.batch(set, own, std::min(micro_batch_size, windows - own));
      });
      Partial part{.targets = batch.target_count};
      if (part.targets == 0) {
        if (teacher != nullptr) teacher->join_expert_collectives();
        model.join_expert_collectives();
      } else {
        const DeviceBatch rows = to_device(model, batch, 0, batch.sequences);
        const Teaching teaching{.teacher = teacher, .cross_entropy = teacher ? empty(model.device(), Dtype::f64, {1}) : Tensor()};
        const Tensor loss = model.loss(rows.tokens, rows.targets, 1, nullptr, teaching).value();
        part.loss = to_host<double>(teacher ? teaching.cross_entropy : loss)[0];
        if (teacher != nullptr) part.divergence = to_host<double>(loss)[0];
      }
      for (const Partial& each : ranks.all(part)) {
        sum.loss += each.loss;
        divergence += each.divergence;
        sum.targets += each.targets;
      }
    }
    result.loss += sum.loss;
    result.targets += sum.targets;
    sum.loss /= static_cast<double>(sum.targets);  // NaN without any
    result.sets.push_back(std::move(sum));
  }
  result.loss /= static_cast<double>(result.targets);
  if (teacher != nullptr) result.divergence = divergence / static_cast<double>(result.targets);
  return result;
}

Batch batch_of(const std::vector<int32_t>& sequence) {
  require(sequence.size() >= 2, "a sequence of ", sequence.size(), " tokens has nothing to predict");
  Batch batch;
  batch.sequences = 1;
  batch.length = batch.target_count = static_cast<int64_t>(sequence.size()) - 1;
  batch.all_count = true;
  batch.tokens.assign(sequence.begin(), sequence.end() - 1);
  batch.targets.assign(sequence.begin() + 1, sequence.end());
  batch.positions.resize(batch.tokens.size());
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  batch.segment_starts.assign(batch.tokens.size(), 0);
  return batch;
}

std::vector<float> target_logprobs(Gpt& model, const Batch& batch) {
  const DeviceBatch rows = to_device(model, batch, 0, batch.sequences);
  std::vector<float> logprobs = to_host<float>(converted(model.target_losses(rows.tokens, rows.targets), Dtype::f32));
  for (size_t i = 0; i < logprobs.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    require(std::isfinite(logprobs[i]), ExitCode::numerical, "the probability of the target [", at / batch.length, ", ", at % batch.length,
            "] is not a number");
    logprobs[i] = batch.targets[i] == kNoTarget ? 0.0F : 0.0F - logprobs[i];  // not -0
  }
  return logprobs;
}

}  // namespace mantissa
