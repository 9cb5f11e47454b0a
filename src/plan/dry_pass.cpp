#include "plan/dry_pass.h"

#include <algorithm>

#include "backend/dry_backend.h"
#include "config/training_options.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

struct Rows {
  int64_t sequences, length;
  int64_t tokens() const { return sequences * length; }
};

// A group of ranks of which there is only the first.
struct DryGroup {
  explicit DryGroup(int64_t size) : ranks(dry_transport(static_cast<int>(size), exchanged)) {}
  GroupTraffic exchanged;
  Communicator ranks;
};

DryPass run(const RunConfig& config, const PrecisionPlan& plan, const Rows& rows) {
  const DryGroup tensor(config.parallel.tensor), experts(config.parallel.expert);
  const auto device = dry_backend(config.parallel.expert);
  Gpt model(
      config.model, *device, plan,
      training_options(config, {.tensor = tensor.ranks, .expert = experts.ranks, .sequence_parallel = config.parallel.sequence_parallel}));
  model.parameters().reset_gradients();
  const auto in_use = [&] { return device->allocator_stats().in_use; };
  const Tensor ids = empty(*device, Dtype::i32, {rows.tokens()});
  RouterStatistics routing(RouterFigures::counts, config.model.expert_layers() * *config.training.grad_accum);  // stays for the step
  const auto forward_and_backward = [&] {
    Tape tape;
    const Tape::Scope scope(&tape);
    const Var loss =
        model.loss({.batch = rows.sequences, .tokens = ids, .positions = ids, .segment_starts = {}}, ids, rows.tokens(), &routing);
    const int64_t kept = in_use();
    tape.backward(loss);
    return kept;
  };
  const int64_t kept = forward_and_backward(), lasting = in_use();  // with tables that stay, as of rotations
  const Traffic sent = experts.ranks.traffic();                     // ranks that share experts each send and receive as much
  return {
      .activations = kept - lasting,
      .workspace = device->allocator_stats().peak_in_use - kept,
      .tensor = {.bytes = tensor.exchanged.sent,
                 .control = tensor.ranks.traffic().control * tensor.ranks.size(),
                 .busiest = tensor.exchanged.busiest},
      .experts = {
          .bytes = sent.activations * experts.ranks.size(), .control = sent.control * experts.ranks.size(), .busiest = sent.activations}};
}

// Extrapolates linearly from two numbers of tokens, up to sizes that no machine has.
DryPass extrapolated(const DryPass& of_few, const DryPass& of_many, double factor) {
  const auto line = [factor](int64_t few, int64_t many) {
    return static_cast<int64_t>(std::min(static_cast<double>(many) + static_cast<double>(many - few) * factor, 1e18));
  };
  const auto lines = [&](const Exchanges& few, const Exchanges& many) {
    return Exchanges{
        .bytes = line(few.bytes, many.bytes), .control = line(few.control, many.control), .busiest = line(few.busiest, many.busiest)};
  };
  return {.activations = line(of_few.activations, of_many.activations),
          .workspace = line(of_few.workspace, of_many.workspace),
          .tensor = lines(of_few.tensor, of_many.tensor),
          .experts = lines(of_few.experts, of_many.experts)};
}

}  // namespace

DryPass dry_pass(const RunConfig& config, const PrecisionPlan& plan) {
  const Rows all{.sequences = config.training.micro_batch_size, .length = config.training.seq_len};
  if (all.tokens() <= kMostTokens) return run(config, plan, all);
  const int64_t length = std::min(all.length, kMostTokens), sequences = std::min(all.sequences, kMostTokens / length);
  const Rows many{.sequences = sequences, .length = length};
  const Rows few = sequences > 1 ? Rows{.sequences = sequences / 2, .length = length} : Rows{.sequences = 1, .length = length / 2};
  const double factor = static_cast<double>(all.tokens() - many.tokens()) / static_cast<double>(many.tokens() - few.tokens());
  return extrapolated(run(config, plan, few), run(config, plan, many), factor);
}

}  // namespace mantissa
