#include "mantissa/train/training_step.h"

#include <algorithm>
#include <cmath>

#include "mantissa/train/device_batch.h"
#include "train/ranks.h"

namespace mantissa {
namespace {

Tensor forward_and_backward(Gpt& model, const DeviceBatch& rows, int64_t target_count) {
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var loss = model.loss(rows.tokens, rows.targets, target_count);
  tape.backward(loss);
  return loss.value();
}

// Fake quantisation may turn a NaN weight into a number, and the loss with it, so weights come first.
std::string first_bad_value(const UpdateResult& update, const Optimizer& optimizer) {
  if (update.bad_weights) return optimizer.first_nonfinite_weight();
  if (!std::isfinite(update.loss)) return text("loss = ", update.loss);
  return optimizer.first_nonfinite_gradient();
}

// What is bad may lie in the parts of one rank.
std::string first_of_ranks(const Communicator& ranks, const std::string& own) {
  if (ranks.size() == 1) return own;
  const std::vector<std::string> all = gather_texts(ranks, own);
  return *std::ranges::max_element(all, {}, [](const std::string& text) { return !text.empty(); });
}

}  // namespace

StepResult training_step(Gpt& model, Optimizer& optimizer, GradientAccumulator& accumulator, const Batch& batch, int64_t micro_batch_size,
                         double lr) {
  // A batch without a target (everything masked) has loss 0 and no gradient.
  const int64_t targets = std::max<int64_t>(1, optimizer.shards().data().sum(batch.target_count));
  accumulator.accumulate(
      [&](int64_t i) { return forward_and_backward(model, to_device(model, batch, i * micro_batch_size, micro_batch_size), targets); });
  const UpdateResult update = optimizer.update(lr, {.losses = accumulator.losses(), .pairwise = accumulator.pairwise()});
  return {.loss = update.loss,
          .gradient_norm = update.gradient_norm,
          .skipped = update.skipped,
          .bad = update.skipped ? first_of_ranks(optimizer.shards().data(), first_bad_value(update, optimizer)) : ""};
}

}  // namespace mantissa
