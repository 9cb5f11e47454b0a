#include "plan/cost.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "hf/hugging_face.h"
#include "mantissa/base/integers.h"
#include "metrics/routing_summary.h"
#include "models/model_shape.h"
#include "nn/modules.h"
#include "nn/shards.h"
#include "optim/optimizer.h"
#include "plan/memory.h"

namespace mantissa {
namespace {

// Returns the layout that all ranks have alike: tensor ranks hold shares of equal size, and so do ranks that share experts.
Layout layout_of(const RunConfig& config, const PrecisionPlan& plan) {
  return {parameter_specs(plan, config.parallel.ranks(), config.training.expert_gradients()), Shards::kBucketBytes};
}

// Returns the shares of the ranks that hold a bucket.
std::vector<Layout::Share> shares_of(const RunConfig& config, const Layout& layout, const Layout::Bucket& bucket) {
  return layout.shares(bucket, static_cast<int>(config.parallel.data / layout.expert_ranks(bucket)));
}

// Bytes of a bucket that the busiest rank sends or receives.
struct BucketBytes {
  int64_t gradients = 0, gathered = 0;
  int64_t all() const { return gradients + gathered; }
};

// A rank sends its gradients of what others own and receives theirs of what it owns; a gather is the reverse.
int64_t busiest(int64_t all, int64_t least, int64_t most, int64_t ranks) { return std::max(all - least, most * (ranks - 1)); }

// Adds what `tensor` ranks exchange to sum the partial ones of their own gradients.
BucketBytes busiest(const std::vector<Layout::Share>& shares, int64_t tensor) {
  Layout::Share all, least = shares.front(), most;
  int64_t partial = 0;
  for (const Layout::Share& share : shares) {
    partial = std::max(partial, share.partial);
    all.gradients += share.gradients;
    all.gathered += share.gathered;
    least = {.gradients = std::min(least.gradients, share.gradients), .gathered = std::min(least.gathered, share.gathered)};
    most = {.gradients = std::max(most.gradients, share.gradients), .gathered = std::max(most.gathered, share.gathered)};
  }
  const auto ranks = static_cast<int64_t>(shares.size());
  return {.gradients = busiest(all.gradients, least.gradients, most.gradients, ranks) + 2 * ceil_div(partial * (tensor - 1), tensor),
          .gathered = busiest(all.gathered, least.gathered, most.gathered, ranks)};
}

// Counts all-gathers of numbers of 8 bytes: the message that decides the step, with the reported numbers, losses, assignments and norms of
// each rank of the world; and, if some targets may not count, how many do and how many tokens are padding, among the data ranks.
int64_t control_bytes(const RunConfig& config, int64_t assignments, int64_t norm_blocks) {
  const int64_t world = config.parallel.world(), data = config.parallel.data;
  const int64_t reported = (world - 1) * (world * (kReportedNumbers + *config.training.grad_accum + assignments) + norm_blocks);
  const int64_t targets = config.data.mask_eod_loss && data > 1 ? 2 * (data - 1) * world : 0;
  const int64_t always = (reported + targets) * static_cast<int64_t>(sizeof(double)) + (targets > 0 ? 2 : 1) * world * kHeaderBytes;
  const int64_t numbers = routing_numbers(config);  // statistics of routers, in the steps that report them
  const int64_t each = (data - 1) * numbers * static_cast<int64_t>(sizeof(double)) + kHeaderBytes;
  const int64_t routing = data == 1 || numbers == 0 ? 0 : config.parallel.tensor * data * each;
  return always + routing / config.logging.interval;
}

// FLOPs of one token, forward and backward, including recomputed ones.
struct Work {
  double once = 0.0, again = 0.0;
  double frozen = 0.0;  // that are not in `once`: weight gradients of frozen modules
  double forward() const { return (once + frozen) / 3; }
  double backward() const { return once + again - forward(); }
};

struct ModelWork {
  std::vector<Work> buckets;
  Work tied_head;  // after the last bucket, with the weights of the first
};

Work work_of(const ModulePrecision& entry, const TrainingConfig& training) {
  const ModuleShape& module = entry.module;
  const double gemms = has_gemm(module.kind) ? 6.0 * static_cast<double>(module.active_elements()) : 0.0;
  const double attention = attention_flops_per_token(module, training.seq_len);
  const bool layer = module.kind == ModuleKind::linear || module.kind == ModuleKind::router;
  const double again = training.recompute == Recompute::full && layer ? (gemms + attention) / 3
                       : training.recompute == Recompute::selective   ? attention / 3
                                                                      : 0.0;
  const double frozen = entry.training.frozen() ? gemms / 3 : 0.0;
  return {.once = gemms + attention - frozen, .again = again, .frozen = frozen};
}

// A module has one or two parameters, in the order of the modules.
ModelWork model_work(const RunConfig& config, const PrecisionPlan& plan, const Layout& layout) {
  ModelWork out{.buckets = std::vector<Work>(layout.buckets().size()), .tied_head = {}};
  size_t parameter = 0, bucket = 0;
  for (const ModulePrecision& entry : plan.modules()) {
    while (parameter >= layout.buckets()[bucket].last) ++bucket;
    const Work work = work_of(entry, config.training);
    out.buckets[bucket].frozen += work.frozen;
    out.buckets[bucket].once += work.once;
    out.buckets[bucket].again += work.again;
    parameter += entry.module.bias > 0 ? 2 : 1;
  }
  if (config.model.tie_word_embeddings) {
    const ModulePrecision& embed = plan.of("embed");
    const double each = 2.0 * static_cast<double>(embed.module.weight_elements()), frozen = embed.training.frozen() ? each : 0.0;
    out.tied_head = {.once = 3.0 * each - frozen, .frozen = frozen};
  }
  return out;
}

// Returns how long after the last backward pass the exchange ends.
double exchange_not_hidden(const ModelWork& work, const std::vector<double>& seconds, double seconds_per_flop) {
  double passed = work.tied_head.backward() * seconds_per_flop, through = 0.0;
  for (size_t b = seconds.size(); b-- > 0;) {
    passed += work.buckets[b].backward() * seconds_per_flop;
    through = std::max(through, passed) + seconds[b];
  }
  return through - passed;
}

// Returns how long the first forward pass waits.
double gather_not_hidden(const ModelWork& work, const std::vector<double>& seconds, double seconds_per_flop) {
  double through = 0.0, passed = 0.0, waited = 0.0;
  for (size_t b = 0; b < seconds.size(); ++b) {
    through += seconds[b];
    waited += std::max(0.0, through - passed);
    passed = std::max(passed, through) + work.buckets[b].forward() * seconds_per_flop;
  }
  return waited;
}

DryPass exchanges_of_pass(const RunConfig& config, const PrecisionPlan& plan) {
  return config.parallel.ranks().several() ? dry_pass(config, plan) : DryPass{};
}

}  // namespace

StepBytes step_bytes(const RunConfig& config, const PrecisionPlan& plan) {
  const Layout layout = layout_of(config, plan);
  const int64_t data = config.parallel.data, tensor = config.parallel.tensor, world = config.parallel.world();
  StepBytes out{.sent = {}, .buckets = static_cast<int64_t>(layout.buckets().size())};
  if (world == 1) return out;
  const DryPass pass = exchanges_of_pass(config, plan);
  const int64_t replicas = data * *config.training.grad_accum;  // micro batches of all
  const int64_t groups = replicas / config.parallel.expert;     // each of one of every rank that shares experts
  int64_t norm_blocks = 0, calls = 0;
  for (const Layout::Bucket& bucket : layout.buckets()) {
    const std::vector<Layout::Share> shares = shares_of(config, layout, bucket);
    const int64_t ranks = std::ssize(shares), alike = tensor * layout.expert_ranks(bucket);
    int64_t summed = 0;
    for (const Layout::Share& share : shares) {
      norm_blocks += alike * share.norm_blocks;
      out.sent.gradients += alike * (ranks - 1) * share.gradients;
      out.sent.parameters += alike * (ranks - 1) * share.gathered;
      summed += share.partial;
    }
    out.sent.gradients += 2 * (tensor - 1) * summed;  // gradients of experts are never partial
    const std::span<const ParameterSpec> parameters(layout.parameters());
    const int64_t trained = std::ranges::count_if(parameters.subspan(bucket.first, bucket.last - bucket.first), &ParameterSpec::trained);
    const int64_t sums = bucket.of_experts ? trained : std::min<int64_t>(trained, 1);  // each of its parameters by itself
    calls += (ranks > 1 && trained > 0 ? sums + 1 : 0) + (summed > 0 ? 1 : 0);
    out.busiest += busiest(shares, tensor).all();
  }
  out.busiest += *config.training.grad_accum * (pass.tensor.busiest + pass.experts.busiest);
  out.sent.activations = replicas * pass.tensor.bytes + tensor * groups * pass.experts.bytes;
  out.sent.control = control_bytes(config, plan.buffers(), norm_blocks) + calls * world * kHeaderBytes + replicas * pass.tensor.control +
                     tensor * groups * pass.experts.control;
  return out;
}

GatherBytes gather_bytes(const RunConfig& config, const PrecisionPlan& plan) {
  const Layout layout = layout_of(config, plan);
  struct Moved {
    int64_t bytes = 0, elements = 0;
    double ratio() const { return elements > 0 ? static_cast<double>(bytes) / static_cast<double>(elements) : 0.0; }
  } codes, values;
  for (size_t i = 0; i < layout.parameters().size(); ++i) {
    const ParameterSpec& parameter = layout.parameters()[i];
    if (!parameter.trained()) continue;
    Moved& moved = parameter.keeps_value ? values : codes;
    moved.elements += parameter.shape.elements();
    moved.bytes += layout.gathered(i);
  }
  return {.codes = codes.ratio(), .values = values.ratio()};
}

StepTime step_time(const RunConfig& config, const PrecisionPlan& plan, const Rates& rates) {
  const Layout layout = layout_of(config, plan);
  const ModelWork work = model_work(config, plan, layout);
  const int64_t tensor = config.parallel.tensor, micro_batches = *config.training.grad_accum;
  const double tokens = static_cast<double>(config.training.micro_batch_size * config.training.seq_len) / static_cast<double>(tensor);
  const double link = rates.link.value_or(1.0);
  StepTime out;
  double flops = work.tied_head.once + work.tied_head.again;  // FLOPs of a token
  for (const auto& bucket : work.buckets) flops += bucket.once + bucket.again;
  if (rates.flops) out.compute = flops * tokens * static_cast<double>(micro_batches) / *rates.flops;
  if (!rates.link && config.parallel.world() > 1) return out;
  std::vector<double> exchange, gather;
  for (const Layout::Bucket& bucket : layout.buckets()) {
    const BucketBytes bytes = busiest(shares_of(config, layout, bucket), tensor);
    exchange.push_back(static_cast<double>(bytes.gradients) / link);
    gather.push_back(static_cast<double>(bytes.gathered) / link);
  }
  out.exchange = std::accumulate(exchange.begin(), exchange.end(), 0.0);
  out.gather = std::accumulate(gather.begin(), gather.end(), 0.0);
  const DryPass pass = exchanges_of_pass(config, plan);
  out.activations = static_cast<double>(micro_batches * (pass.tensor.busiest + pass.experts.busiest)) / link;
  if (!rates.flops) return out;
  const bool beside = tensor == 1 && config.parallel.expert == 1;
  out.exchange_not_hidden = beside ? exchange_not_hidden(work, exchange, tokens / *rates.flops) : *out.exchange;
  out.gather_not_hidden = beside ? gather_not_hidden(work, gather, tokens / *rates.flops) : *out.gather;
  out.step = *out.compute + *out.activations + *out.exchange_not_hidden + *out.gather_not_hidden;
  return out;
}

std::vector<std::string> run_warnings(const RunConfig& config, const PrecisionPlan& plan) {
  std::vector<std::string> warnings = plan.warnings();
  const std::optional<std::string> advice = config.parallel.world() > 1 ? plan.gather_advice() : std::nullopt;
  if (advice) warnings.push_back(*advice);
  if (config.parallel.expert > 1 && plan.dispatch_advice()) warnings.push_back(*plan.dispatch_advice());
  const int64_t warmup = config.schedule.warmup_steps;
  if (const std::optional<int64_t>& steps = config.training.steps; steps && warmup >= *steps)
    warnings.push_back(text("schedule.warmup_steps ", warmup, ": the run ends after ", count_text(*steps, "step"),
                            ", so the learning rate never reaches optimizer.lr"));
  try {
    architecture_of(config.model);
  } catch (const Error& error) {  // no architecture has the model: says why in one line
    if (error.code() != ExitCode::usage) throw;
    std::string why;
    for (const std::string& line : split(error.what(), '\n')) {
      const std::string words = line.substr(std::min(line.find_first_not_of(' '), line.size()));
      why += (why.empty() ? "" : why.back() == ':' ? " " : "; ") + words;
    }
    warnings.push_back("the model cannot be exported: " + why);
  }
  return warnings;
}

}  // namespace mantissa
