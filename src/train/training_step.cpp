#include "mantissa/train/training_step.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "mantissa/backend/moment.h"
#include "mantissa/base/trace.h"
#include "mantissa/comm/agreement.h"
#include "mantissa/ops/quantization_observer.h"
#include "train/expert_bias.h"

namespace mantissa {
namespace {

// Fake quantization may turn a NaN weight, and with it the loss, into a number, so weights are checked first.
Optimizer::Nonfinite first_bad_value(const UpdateResult& update, const Optimizer& optimizer) {
  if (update.bad_weights) return optimizer.first_nonfinite_weight();
  if (!std::isfinite(update.loss)) return {.text = text("loss = ", update.loss)};
  return optimizer.first_nonfinite_gradient();
}

// The bad value may lie in the shards of one rank: finds the first in the order of the parameters, and its rank.
std::string first_of_ranks(const Communicator& ranks, const Optimizer::Nonfinite& own) {
  if (ranks.size() == 1) return own.text;
  using Place = std::pair<size_t, int64_t>;
  struct Found {
    size_t parameter;
    int64_t row;
  };
  const std::vector<Found> all = ranks.all(Found{own.parameter, own.row});
  const auto first = std::ranges::min_element(all, {}, [](const Found& found) { return Place(found.parameter, found.row); }) - all.begin();
  const std::string bad = all_gather_strings(ranks, own.text)[static_cast<size_t>(first)];
  const bool everywhere = all[static_cast<size_t>(first)].parameter == Optimizer::Nonfinite().parameter;
  return everywhere ? bad : text(bad, " (rank ", first, ")");
}

struct BatchCounts {
  int64_t targets = 0, padding = 0;
};

// Adds up what all ranks have. An exchange would wait for the weights of the step before, which forward can do without at first; data
// whose targets all count have no padding.
BatchCounts counts_of_ranks(const Communicator& ranks, const Batch& batch) {
  if (batch.all_count) return {.targets = batch.target_count * ranks.size()};
  BatchCounts sum;
  for (const BatchCounts& each : ranks.all(BatchCounts{.targets = batch.target_count, .padding = batch.padding()})) {
    sum.targets += each.targets;
    sum.padding += each.padding;
  }
  return sum;
}

}  // namespace

Tensor forward_and_backward(Gpt& model, const DeviceBatch& rows, int64_t target_count, RouterStatistics& routing) {
  Tape tape;
  const Tape::Scope scope(&tape);
  const PaddingScope padding(rows.tokens.lengths, rows.targets.dim(0) / rows.tokens.batch);
  const auto forward = [&] {
    const TraceSpan span(Track::compute, "forward");
    return model.loss(rows.tokens, rows.targets, target_count, &routing);
  };
  const Var loss = forward();
  const TraceSpan span(Track::compute, "backward");
  tape.backward(loss);
  return loss.value();
}

StepResult training_step(Gpt& model, Optimizer& optimizer, GradientAccumulator& accumulator, const Batch& batch, int64_t micro_batch_size,
                         double lr, StepOptions options) {
  // A batch without a target (everything masked) has loss 0 and no gradient but that of routers' auxiliary losses.
  const BatchCounts counts = counts_of_ranks(optimizer.shards().mesh().data, batch);
  const int64_t targets = std::max<int64_t>(1, counts.targets);
  RouterStatistics routing(options.routers, model.config().expert_layers() * accumulator.losses().elements());
  CommunicationMeter communication;
  const Moment began(model.device());
  const auto micro_batch = [&](int64_t i) {
    if (options.uploaded.empty()) return to_device(model, batch, i * micro_batch_size, micro_batch_size);
    return std::exchange(options.uploaded.at(static_cast<size_t>(i)), {});
  };
  const auto position = [&](int64_t i) {
    RoundingPosition at = options.rounding;
    at.token += i * micro_batch_size * batch.length;
    return at;
  };
  accumulator.accumulate(
      [&](int64_t i) {
        const RoundingScope scope(position(i));
        return forward_and_backward(model, micro_batch(i), targets, routing);
      },
      optimizer.shards());
  const Moment ended(model.device());
  communication.stop();
  const TraceSpan span(Track::compute, "optimizer");
  const UpdateResult update =
      optimizer.update(lr, {.losses = accumulator.losses(),
                            .pairwise = accumulator.pairwise(),
                            .vote = options.vote ? options.vote() : 0,
                            .seconds = [&] { return began.seconds_until(ended) - communication.seconds(); },
                            .figures = routing.figures(),
                            .assignments = [&](auto figures) { return expert_assignments(model.parameters(), figures); },
                            .meanwhile = options.meanwhile});
  if (!update.skipped && !update.assignments.empty()) {
    update_expert_biases(model.parameters(), model.config().moe->bias_update_rate, update.assignments);
  }
  return {.loss = update.loss,
          .targets = counts.targets,
          .padding = counts.padding,
          .gradient_norm = update.gradient_norm,
          .skipped = update.skipped,
          .bad = update.skipped ? first_of_ranks(optimizer.shards().mesh().world, first_bad_value(update, optimizer)) : "",
          .vote = update.vote,
          .sent = update.sent,
          .seconds = update.seconds,
          .routers = options.routers,
          .routing = update.figures};
}

}  // namespace mantissa
