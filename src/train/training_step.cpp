#include "train/training_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "comm/mesh.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/trace.h"
#include "ops/quantization_observer.h"

namespace mantissa {
DeviceBatch to_device(const Gpt& model, const Batch& batch, int64_t first, int64_t count) {
  require(first >= 0 && count > 0 && first + count <= batch.sequences, "to_device: sequences ", first, " + ", count, " of ",
          batch.sequences);
  const int64_t vocab = *model.config().vocab_size;
  for (int64_t i = first * batch.length; i < (first + count) * batch.length; ++i) {
    const auto require_in = [&](int64_t begin, int64_t end, ExitCode code, const char* name, const std::vector<int32_t>& values) {
      const int64_t value = values[static_cast<size_t>(i)];
      if (value >= begin && value < end) return;
      fail(code, "batch: ", name, " [", i / batch.length, ", ", i % batch.length, "] is ", value, ", not in [", begin, ", ", end, ')');
    };
    require_in(0, vocab, ExitCode::data, "token", batch.tokens);
    require_in(kNoTarget, vocab, ExitCode::data, "target", batch.targets);
    require_in(0, std::min(batch.length, model.config().max_position_embeddings), ExitCode::internal, "position", batch.positions);
    require_in(0, i % batch.length + 1, ExitCode::internal, "segment start", batch.segment_starts);
  }
  for (int64_t row = first; row < first + count && !batch.lengths.empty(); ++row) {
    const int32_t length = batch.lengths[static_cast<size_t>(row)];
    require(length >= 0 && length <= batch.length, "batch: sequence ", row, " has ", length, " tokens of ", batch.length);
  }
  const auto upload = [&](const std::vector<int32_t>& values) {
    return from_host(model.device(), Dtype::i32, {count * batch.length}, values.data() + first * batch.length);
  };
  // Without boundaries inside the rows attention takes its simple path.
  const auto starts = batch.segment_starts.begin() + first * batch.length;
  const bool segmented = std::any_of(starts, starts + count * batch.length, [](int32_t start) { return start != 0; });
  std::vector<int32_t> lengths;  // none if all of the rows are full
  if (!batch.lengths.empty()) lengths.assign(batch.lengths.begin() + first, batch.lengths.begin() + first + count);
  if (std::ranges::count(lengths, batch.length) == count) lengths.clear();
  return {.tokens = {.batch = count,
                     .tokens = upload(batch.tokens),
                     .positions = upload(batch.positions),
                     .segment_starts = segmented ? upload(batch.segment_starts) : Tensor(),
                     .lengths = std::move(lengths)},
          .targets = upload(batch.targets)};
}

StepBatch StepBatches::take(int64_t first) {
  std::optional<Prefetched> next = std::exchange(next_, {});
  if (!next || next->first != first) return {.rows = data_.batch(first, sizes_.sequences)};
  if (next->error) std::rethrow_exception(next->error);
  return std::move(next->batch);
}

void StepBatches::prefetch(int64_t first) noexcept {
  const TraceSpan span(Track::pass, "next batch");
  Prefetched& next = next_.emplace(Prefetched{.first = first});
  try {
    next.batch.rows = data_.batch(first, sizes_.sequences);
    for (int64_t i = 0; i < sizes_.sequences; i += sizes_.micro_batch_size)
      next.batch.uploaded.push_back(to_device(model_, next.batch.rows, i, sizes_.micro_batch_size));
  } catch (...) {
    next.error = std::current_exception();
  }
}

std::vector<double> expert_assignments(const ParameterSet& parameters, std::span<const double> figures) {
  std::vector<double> sums;
  const size_t layers = parameters.buffers().size();
  if (layers == 0) return sums;
  const auto experts = static_cast<size_t>(parameters.buffers().front().shape.elements()), width = experts + RouterStatistics::kLosses;
  sums.resize(layers * experts);
  for (size_t i = 0; i < figures.size() / width; ++i) {
    for (size_t e = 0; e < experts; ++e) sums[i % layers * experts + e] += figures[i * width + e];
  }
  return sums;
}

// Sums of whole numbers are exact, and so are the comparisons. The host knows what changes but not the biases, and need not wait for
// them.
void update_expert_biases(ParameterSet& parameters, double rate, const std::vector<double>& assignments) {
  std::span<const double> rest = assignments;
  for (const Buffer& bias : parameters.buffers()) {
    const auto experts = static_cast<size_t>(bias.shape.elements());
    const auto of_layer = rest.first(experts);
    const double all = std::accumulate(of_layer.begin(), of_layer.end(), 0.0), count = static_cast<double>(experts);
    const auto step = static_cast<float>(rate);
    std::vector<float> change;
    for (const double each : of_layer) change.push_back(each * count > all ? -step : each * count < all ? step : 0.0F);
    Backend& device = bias.value.device();
    device.run(Add{.a = bias.value, .b = from_host(device, Dtype::f32, bias.shape, change.data()), .out = bias.value});
    rest = rest.subspan(experts);
  }
}

namespace {

// Names the first value that is not finite, in the order of the parameters; with the rank, where it lies in the shards of one. Fake
// quantization may turn a NaN weight, and with it the loss, into a number, so weights are checked first.
std::string first_bad_value(const UpdateResult& update, const Optimizer& optimizer) {
  const Communicator& ranks = optimizer.shards().mesh().world;
  const Optimizer::Nonfinite own = update.bad_weights            ? optimizer.first_nonfinite(Optimizer::Checked::weights)
                                   : !std::isfinite(update.loss) ? Optimizer::Nonfinite{.text = text("loss = ", update.loss)}
                                                                 : optimizer.first_nonfinite(Optimizer::Checked::gradients);
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

}  // namespace

Tensor forward_and_backward(Gpt& model, const DeviceBatch& rows, int64_t target_count, RouterStatistics& routing,
                            const Teaching& teaching) {
  Tape tape;
  const Tape::Scope scope(&tape);
  const PaddingScope padding(rows.tokens.lengths, rows.targets.dim(0) / rows.tokens.batch);
  Var loss;
  {
    const TraceSpan span(Track::pass, "forward");
    loss = model.loss(rows.tokens, rows.targets, target_count, &routing, teaching);
  }
  const TraceSpan span(Track::pass, "backward");
  tape.backward(loss);
  return loss.value();
}

StepResult training_step(Gpt& model, Optimizer& optimizer, GradientAccumulator& accumulator, const Batch& batch, int64_t micro_batch_size,
                         double lr, StepOptions options) {
  // Targets and padding of all ranks. An exchange here would first wait for all weights that the step before still sends, while forward can
  // begin with the first of them. It is not needed for data whose targets all count: they have no padding, either.
  std::array<int64_t, 2> counts{batch.target_count, batch.padding()};
  const Communicator& data = optimizer.shards().mesh().data;
  if (batch.all_count)
    counts = {batch.target_count * data.size(), 0};
  else
    data.sum(counts);
  const auto [target_count, padding_count] = counts;
  // A batch without a target (everything masked) has loss 0 and no gradient but that of routers' auxiliary losses.
  const int64_t targets = std::max<int64_t>(1, target_count);
  RouterStatistics routing(options.routers, model.config().expert_layers() * accumulator.losses().elements());
  CommunicationMeter communication;
  const Moment began(model.device());
  const auto micro_batch = [&](int64_t i) {
    if (options.uploaded.empty()) return to_device(model, batch, i * micro_batch_size, micro_batch_size);
    return std::exchange(options.uploaded.at(static_cast<size_t>(i)), {});
  };
  const bool taught = options.cross_entropies && options.teaching.teacher != nullptr;
  const Tensor entropies = taught ? empty(model.device(), Dtype::f64, accumulator.losses().shape()) : Tensor();
  accumulator.accumulate(
      [&](int64_t i) {
        const TraceSpan micro(Track::pass, "micro batch", i + 1);
        RoundingPosition at = options.rounding;
        at.token += i * micro_batch_size * batch.length;
        const RoundingScope scope(at);
        if (taught) options.teaching.cross_entropy = entropies.slice(i, i + 1);
        return forward_and_backward(model, micro_batch(i), targets, routing, options.teaching);
      },
      optimizer.shards());
  const Moment ended(model.device());
  communication.stop();
  const TraceSpan span(Track::pass, "optimizer");
  StepResult result{optimizer.update(lr, {.losses = accumulator.losses(),
                                          .pairwise = accumulator.pairwise(),
                                          .vote = options.vote ? options.vote() : 0,
                                          .seconds = [&] { return began.seconds_until(ended) - communication.seconds(); },
                                          .figures = routing.figures(),
                                          .assignments = [&](auto figures) { return expert_assignments(model.parameters(), figures); },
                                          .meanwhile = options.meanwhile})};
  if (!result.skipped && !result.assignments.empty()) {
    update_expert_biases(model.parameters(), model.config().moe->bias_update_rate, result.assignments);
  }
  if (result.skipped) result.bad = first_bad_value(result, optimizer);
  if (taught) result.cross_entropies = to_host<double>(entropies);
  result.targets = target_count;
  result.padding = padding_count;
  result.routers = options.routers;
  return result;
}

}  // namespace mantissa
