#include "mantissa/train/cost.h"

#include <algorithm>

#include "mantissa/models/model_shape.h"
#include "mantissa/nn/layout.h"
#include "mantissa/nn/modules.h"
#include "mantissa/nn/shards.h"

namespace mantissa {
namespace {

constexpr int64_t kHeader = 32;  // bytes of each call to the right neighbour (communicator.h)
constexpr int64_t kTold = 7;     // numbers that a rank tells before its losses and norms (optimizer.cpp)

Layout layout_of(const PrecisionPlan& plan) { return {parameter_specs(plan), Shards::kBucketBytes}; }

// Of a bucket: what the busiest rank sends or receives of it.
struct BucketBytes {
  int64_t gradients = 0, gathered = 0;
};

// A rank sends its gradients of what others own and receives theirs of what it owns; a gather is the reverse.
int64_t busiest(int64_t all, int64_t least, int64_t most, int64_t ranks) { return std::max(all - least, most * (ranks - 1)); }

BucketBytes busiest(const std::vector<Layout::Share>& shares) {
  Layout::Share all, least = shares.front(), most;
  for (const Layout::Share& share : shares) {
    all.gradients += share.gradients;
    all.gathered += share.gathered;
    least = {.gradients = std::min(least.gradients, share.gradients), .gathered = std::min(least.gathered, share.gathered)};
    most = {.gradients = std::max(most.gradients, share.gradients), .gathered = std::max(most.gathered, share.gathered)};
  }
  const auto ranks = static_cast<int64_t>(shares.size());
  return {.gradients = busiest(all.gradients, least.gradients, most.gradients, ranks),
          .gathered = busiest(all.gathered, least.gathered, most.gathered, ranks)};
}

// All-gathers of numbers of 8 bytes: the message that decides the step, with what each rank tells, its losses and its norms; and where some
// targets may not count, how many do.
int64_t control_bytes(const RunConfig& config, int64_t norm_bands) {
  const int64_t ranks = config.parallel.data, calls = config.data.mask_eod_loss ? 2 : 1;
  const int64_t numbers = ranks * (kTold + *config.training.grad_accum + calls - 1) + norm_bands;
  return (ranks - 1) * numbers * static_cast<int64_t>(sizeof(double)) + calls * ranks * kHeader;
}

// FLOPs of one token, forward and backward, and what is computed again before backward.
struct Work {
  double once = 0.0, again = 0.0;
  double forward() const { return once / 3; }
  double backward() const { return 2 * once / 3 + again; }
};

struct ModelWork {
  std::vector<Work> buckets;
  Work tied_head;  // after the last bucket, with the weights of the first
};

Work work_of(const ModuleShape& module, const TrainingConfig& training) {
  const bool multiplies = module.kind == ModuleKind::linear || module.kind == ModuleKind::output;
  const double products = multiplies ? 6.0 * static_cast<double>(module.weight_elements()) : 0.0;
  const bool attends = module.path.ends_with(".attn.out");
  const double attention = attends ? 6.0 * static_cast<double>(module.in) * static_cast<double>(training.seq_len) : 0.0;
  const bool layer = module.kind == ModuleKind::linear;
  const double again = training.recompute == Recompute::full && layer ? (products + attention) / 3
                       : training.recompute == Recompute::selective   ? attention / 3
                                                                      : 0.0;
  return {.once = products + attention, .again = again};
}

// The parameters of a module are one or two, in the order of the modules.
ModelWork model_work(const RunConfig& config, const PrecisionPlan& plan, const Layout& layout) {
  ModelWork out{.buckets = std::vector<Work>(layout.buckets().size()), .tied_head = {}};
  size_t parameter = 0, bucket = 0;
  for (const ModulePrecision& entry : plan.modules()) {
    while (parameter >= layout.buckets()[bucket].last) ++bucket;
    const Work work = work_of(entry.module, config.training);
    out.buckets[bucket].once += work.once;
    out.buckets[bucket].again += work.again;
    parameter += entry.module.bias > 0 ? 2 : 1;
  }
  if (config.model.tie_word_embeddings) out.tied_head.once = 6.0 * static_cast<double>(plan.of("embed").module.weight_elements());
  return out;
}

double of_all(const ModelWork& work) {
  double sum = work.tied_head.once + work.tied_head.again;
  for (const Work& bucket : work.buckets) sum += bucket.once + bucket.again;
  return sum;
}

// How long after the last backward pass the exchange ends.
double exchange_not_hidden(const ModelWork& work, const std::vector<double>& seconds, double seconds_per_flop) {
  double passed = work.tied_head.backward() * seconds_per_flop, through = 0.0;
  for (size_t b = seconds.size(); b-- > 0;) {
    passed += work.buckets[b].backward() * seconds_per_flop;
    through = std::max(through, passed) + seconds[b];
  }
  return through - passed;
}

// How long the first forward pass waits.
double gather_not_hidden(const ModelWork& work, const std::vector<double>& seconds, double seconds_per_flop) {
  double through = 0.0, passed = 0.0, waited = 0.0;
  for (size_t b = 0; b < seconds.size(); ++b) {
    through += seconds[b];
    waited += std::max(0.0, through - passed);
    passed = std::max(passed, through) + work.buckets[b].forward() * seconds_per_flop;
  }
  return waited;
}

double sum(const std::vector<double>& values) {
  double out = 0.0;
  for (const double value : values) out += value;
  return out;
}

}  // namespace

std::optional<StepBytes> step_bytes(const RunConfig& config, const PrecisionPlan& plan) {
  if (config.parallel.tensor > 1) return {};
  const Layout layout = layout_of(plan);
  const int64_t ranks = config.parallel.data;
  StepBytes out{.sent = {}, .buckets = static_cast<int64_t>(layout.buckets().size())};
  if (ranks == 1) return out;
  int64_t norm_bands = 0;
  for (const Layout::Bucket& bucket : layout.buckets()) {
    const std::vector<Layout::Share> shares = layout.shares(bucket, static_cast<int>(ranks));
    for (const Layout::Share& share : shares) norm_bands += share.norm_bands;
    const BucketBytes of_one = busiest(shares);
    out.busiest += of_one.gradients + of_one.gathered;
  }
  out.sent.gradients = (ranks - 1) * layout.totals().gradients;
  out.sent.parameters = (ranks - 1) * layout.totals().gathered();
  out.sent.control = control_bytes(config, norm_bands) + 2 * out.buckets * ranks * kHeader;
  return out;
}

GatherBytes gather_bytes(const PrecisionPlan& plan) {
  const Layout layout = layout_of(plan);
  struct Moved {
    int64_t bytes = 0, elements = 0;
    double ratio() const { return elements > 0 ? static_cast<double>(bytes) / static_cast<double>(elements) : 0.0; }
  } codes, values;
  for (size_t i = 0; i < layout.parameters().size(); ++i) {
    const ParameterSpec& parameter = layout.parameters()[i];
    Moved& moved = parameter.keeps_value ? values : codes;
    moved.elements += parameter.shape.elements();
    moved.bytes += layout.gathered(i);
  }
  return {.codes = codes.ratio(), .values = values.ratio()};
}

StepTime step_time(const RunConfig& config, const PrecisionPlan& plan, const Rates& rates) {
  const Layout layout = layout_of(plan);
  const ModelWork work = model_work(config, plan, layout);
  const auto tokens = static_cast<double>(config.training.micro_batch_size * config.training.seq_len);
  const auto ranks = static_cast<int>(config.parallel.data);
  StepTime out;
  const double of_rank =
      of_all(work) * tokens * static_cast<double>(*config.training.grad_accum) / static_cast<double>(config.parallel.tensor);
  if (rates.flops) out.compute = of_rank / *rates.flops;
  if (config.parallel.tensor > 1 || (!rates.link && ranks > 1)) return out;
  std::vector<double> exchange, gather;
  for (const Layout::Bucket& bucket : layout.buckets()) {
    const BucketBytes bytes = ranks > 1 ? busiest(layout.shares(bucket, ranks)) : BucketBytes{};
    exchange.push_back(static_cast<double>(bytes.gradients) / rates.link.value_or(1.0));
    gather.push_back(static_cast<double>(bytes.gathered) / rates.link.value_or(1.0));
  }
  out.exchange = sum(exchange);
  out.gather = sum(gather);
  if (!rates.flops) return out;
  out.exchange_not_hidden = exchange_not_hidden(work, exchange, tokens / *rates.flops);
  out.gather_not_hidden = gather_not_hidden(work, gather, tokens / *rates.flops);
  out.step = *out.compute + *out.exchange_not_hidden + *out.gather_not_hidden;
  return out;
}

}  // namespace mantissa
