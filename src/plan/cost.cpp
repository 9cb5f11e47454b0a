#include "plan/cost.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "comm/host_levels.h"
#include "hf/hugging_face.h"
#include "mantissa/base/integers.h"
#include "metrics/routing_summary.h"
#include "models/model_shape.h"
#include "nn/modules.h"
#include "nn/shards.h"
#include "optim/muon.h"
#include "optim/optimizer.h"
#include "plan/memory.h"

namespace mantissa {
namespace {

// Returns the layout that all ranks have alike: tensor ranks hold shares of equal size, and so do ranks that share experts.
Layout layout_of(const RunConfig& config, const PrecisionPlan& plan) {
  return {parameter_specs(plan, config.parallel.ranks(), config.training.expert_gradients()), Shards::bucket_bytes(config.parallel.data)};
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

// Bytes of partial gradients that tensor ranks exchange: each has as many.
int64_t partial_bytes(const std::vector<Layout::Share>& shares, int64_t tensor) {
  int64_t partial = 0;
  for (const Layout::Share& share : shares) partial = std::max(partial, share.partial);
  return 2 * ceil_div(partial * (tensor - 1), tensor);
}

// Adds what `tensor` ranks exchange to sum the partial ones of their own gradients.
BucketBytes busiest(const std::vector<Layout::Share>& shares, int64_t tensor) {
  Layout::Share all, least = shares.front(), most;
  for (const Layout::Share& share : shares) {
    all.gradients += share.gradients;
    all.gathered += share.gathered;
    least = {.gradients = std::min(least.gradients, share.gradients), .gathered = std::min(least.gathered, share.gathered)};
    most = {.gradients = std::max(most.gradients, share.gradients), .gathered = std::max(most.gathered, share.gathered)};
  }
  const auto ranks = static_cast<int64_t>(shares.size());
  return {.gradients = busiest(all.gradients, least.gradients, most.gradients, ranks) + partial_bytes(shares, tensor),
          .gathered = busiest(all.gathered, least.gathered, most.gathered, ranks)};
}

// Ranks that exchange something: first, first + stride, ...
struct SpacedRanks {
  int64_t first = 0, stride = 1, ranks = 1;
};

// Places of the ranks of a run, and what a byte takes between them.
class Hosts {
 public:
  Hosts(const RunConfig& config, int64_t ranks_per_host, double link = 1.0, double host_link = 1.0)
      : parallel_(config.parallel),
        per_host_(ranks_per_host > 0 ? ranks_per_host : parallel_.world()),
        link_(link),
        host_link_(host_link) {}
  Hosts(const RunConfig& config, const Rates& rates)
      : Hosts(config, rates.ranks_per_host, rates.link.value_or(1.0), rates.host_link.value_or(1.0)) {}

  bool several() const { return per_host_ < parallel_.world(); }
  int64_t of(int64_t rank) const { return rank / per_host_; }
  double seconds(double inside, double between) const { return inside / link_ + between / host_link_; }

  // Return the groups of tensor ranks, of those that share experts, and of those that hold the same of a bucket.
  std::vector<SpacedRanks> tensor_groups() const { return groups(parallel_.data, parallel_.tensor, 1, parallel_.tensor); }
  std::vector<SpacedRanks> expert_groups() const {
    std::vector<SpacedRanks> out;
    for (int64_t tensor = 0; tensor < parallel_.tensor; ++tensor) {
      for (int64_t first = 0; first < parallel_.data; first += parallel_.expert)
        out.push_back({.first = first * parallel_.tensor + tensor, .stride = parallel_.tensor, .ranks = parallel_.expert});
    }
    return out;
  }
  std::vector<SpacedRanks> holders(int64_t expert_ranks) const {
    const int64_t apart = expert_ranks * parallel_.tensor;
    return groups(apart, 1, apart, parallel_.world() / apart);
  }

  // Returns how many ranks of the group are on each of its hosts, in their order.
  std::vector<int64_t> on_hosts(const SpacedRanks& group) const {
    std::vector<int64_t> out;
    for (int64_t i = 0, last = -1; i < group.ranks; ++i) {
      const int64_t host = of(group.first + i * group.stride);
      if (host != std::exchange(last, host)) out.push_back(0);
      ++out.back();
    }
    return out;
  }

 private:
  static std::vector<SpacedRanks> groups(int64_t count, int64_t apart, int64_t stride, int64_t ranks) {
    std::vector<SpacedRanks> out;
    for (int64_t i = 0; i < count; ++i) out.push_back({.first = i * apart, .stride = stride, .ranks = ranks});
    return out;
  }

  ParallelConfig parallel_;
  int64_t per_host_;
  double link_, host_link_;
};

// Bytes that a rank moves in an exchange, on its host and beyond.
struct Moved {
  int64_t sent_inside = 0, sent_between = 0, received_inside = 0, received_between = 0;
};

// The ranks of a group on their hosts, with the shares that they own: what each moves in the two levels of host_levels.h.
class SharesOnHosts {
 public:
  // on_hosts are the numbers of ranks on each host, in their order.
  SharesOnHosts(const std::vector<int64_t>& owned, const std::vector<int64_t>& on_hosts) : owned_(owned), on_hosts_(on_hosts) {
    for (size_t host = 0; host < on_hosts.size(); ++host)
      hosts_.insert(hosts_.end(), static_cast<size_t>(on_hosts[host]), static_cast<int>(host));
    all_ = std::accumulate(owned.begin(), owned.end(), int64_t{0});
  }

  // Every rank gets the sum of its share.
  std::vector<Moved> sum() const {
    const auto block = static_cast<size_t>(HostLevels(hosts_).block());
    std::vector<int64_t> at_place(block), here(on_hosts_.size() * block);  // shares of all ranks at a place, and of those on a host
    for (size_t r = 0; r < owned_.size(); ++r) at_place[r % block] += owned_[r], here[host(r) * block + r % block] += owned_[r];
    std::vector<Moved> out;
    for (size_t r = 0; r < owned_.size(); ++r) {
      const int64_t wanted = at_place[r % block], wanted_here = here[host(r) * block + r % block], blocks = count(owned_.size() / block),
                    blocks_here = on_hosts_[host(r)] / count(block);
      out.push_back({.sent_inside = all_ - wanted + wanted_here - owned_[r],
                     .sent_between = wanted - wanted_here,
                     .received_inside = wanted * (count(block) - 1) + owned_[r] * (blocks_here - 1),
                     .received_between = owned_[r] * (blocks - blocks_here)});
    }
    return out;
  }

  // Every rank gets the shares of all.
  std::vector<Moved> gather() const {
    std::vector<Moved> out;
    std::map<int64_t, std::vector<int64_t>> of_receivers;  // shares that each of so many ranks of a host holds, its own among them
    for (size_t first = 0, host = 0; host < on_hosts_.size(); first += static_cast<size_t>(on_hosts_[host++])) {
      const int64_t ranks = on_hosts_[host];
      std::vector<int64_t>& held = of_receivers[ranks];
      if (held.empty()) held = held_by(ranks);
      for (size_t place = 0; place < static_cast<size_t>(ranks); ++place) {
        const int64_t own = owned_[first + place];
        out.push_back({.sent_inside = held[place] * (ranks - 1),
                       .sent_between = own * (count(on_hosts_.size()) - 1),
                       .received_inside = all_ - held[place],
                       .received_between = held[place] - own});
      }
    }
    return out;
  }

 private:
  static int64_t count(size_t value) { return static_cast<int64_t>(value); }
  size_t host(size_t rank) const { return static_cast<size_t>(hosts_[rank]); }
  std::vector<int64_t> held_by(int64_t ranks) const {
    std::vector<int64_t> held(static_cast<size_t>(ranks));
    size_t rank = 0;
    for (const int64_t there : on_hosts_) {
      for (int64_t place = 0; place < there; ++place) held[static_cast<size_t>(place % ranks)] += owned_[rank++];
    }
    return held;
  }

  const std::vector<int64_t>& owned_;
  const std::vector<int64_t>& on_hosts_;
  std::vector<int> hosts_;  // by rank
  int64_t all_ = 0;
};

int64_t crossing_bytes(const std::vector<Moved>& moved) {
  int64_t out = 0;
  for (const Moved& each : moved) out += each.sent_between;
  return out;
}

// Returns the seconds of the rank that needs most, which sends while it receives.
double exchange_seconds(const Hosts& hosts, const std::vector<Moved>& moved) {
  double most = 0.0;
  for (const Moved& each : moved) {
    const auto seconds = [&](int64_t inside, int64_t between) {
      return hosts.seconds(static_cast<double>(inside), static_cast<double>(between));
    };
    most = std::max({most, seconds(each.sent_inside, each.sent_between), seconds(each.received_inside, each.received_between)});
  }
  return most;
}

// Exchanges of the ranks of groups, with equal shares, so that each rank moves as much.
struct Exchanged {
  double crossing = 0.0;  // part of the bytes that goes to another host
  double seconds = 0.0;   // time of a byte, for the rank that needs most
};

// Takes groups of ranks that sum and gather as often.
Exchanged sums_and_gathers(const Hosts& hosts, const std::vector<SpacedRanks>& groups) {
  Exchanged out;
  for (const SpacedRanks& group : groups) {
    if (group.ranks == 1) return {};
    const std::vector<int64_t> owned(static_cast<size_t>(group.ranks), 1), on_hosts = hosts.on_hosts(group);
    const SharesOnHosts shares(owned, on_hosts);
    const std::vector<Moved> summed = shares.sum(), gathered = shares.gather();
    const auto each = static_cast<double>(2 * (group.ranks - 1));  // shares that a rank moves in both
    out.crossing += static_cast<double>(crossing_bytes(summed) + crossing_bytes(gathered)) / each / static_cast<double>(group.ranks) /
                    static_cast<double>(groups.size());
    out.seconds = std::max(out.seconds, (exchange_seconds(hosts, summed) + exchange_seconds(hosts, gathered)) / each);
  }
  return out;
}

// Takes groups of ranks that send each other as much.
Exchanged all_to_all(const Hosts& hosts, const std::vector<SpacedRanks>& groups) {
  Exchanged out;
  for (const SpacedRanks& group : groups) {
    if (group.ranks == 1) return {};
    const auto others = static_cast<double>(group.ranks - 1);
    for (const int64_t here : hosts.on_hosts(group)) {
      const double share = static_cast<double>(group.ranks - here) / others;
      out.crossing += share * static_cast<double>(here) / static_cast<double>(group.ranks) / static_cast<double>(groups.size());
      out.seconds = std::max(out.seconds, hosts.seconds(1.0 - share, share));
    }
  }
  return out;
}

// Shares of a bucket that ranks own of one kind of its bytes.
std::vector<int64_t> owned_bytes(const std::vector<Layout::Share>& shares, int64_t Layout::Share::*kind) {
  std::vector<int64_t> out;
  for (const Layout::Share& share : shares) out.push_back(share.*kind);
  return out;
}

// Seconds of a bucket, of the rank that needs most, without partial gradients.
struct BucketSeconds {
  double gradients = 0.0, gathered = 0.0;
};
BucketSeconds bucket_seconds(const Hosts& hosts, const std::vector<Layout::Share>& shares, int64_t expert_ranks) {
  const auto gradients = owned_bytes(shares, &Layout::Share::gradients), gathered = owned_bytes(shares, &Layout::Share::gathered);
  BucketSeconds out;
  std::vector<std::vector<int64_t>> seen;  // groups that lie alike on their hosts need as long
  for (const SpacedRanks& group : hosts.holders(expert_ranks)) {
    std::vector<int64_t> on_hosts = hosts.on_hosts(group);
    if (std::ranges::count(seen, on_hosts) > 0) continue;
    out.gradients = std::max(out.gradients, exchange_seconds(hosts, SharesOnHosts(gradients, on_hosts).sum()));
    out.gathered = std::max(out.gathered, exchange_seconds(hosts, SharesOnHosts(gathered, on_hosts).gather()));
    seen.push_back(std::move(on_hosts));
  }
  return out;
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
  Work tied_head;        // after the last bucket, with the weights of the first
  double teacher = 0.0;  // forward pass of the teacher
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
  out.teacher = step_flops_per_token(config) - training_flops_per_token(model_shape(config.model), config.training.seq_len);
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

// Returns how long the first forward pass waits, before which comes that of a teacher.
double gather_not_hidden(const ModelWork& work, const std::vector<double>& seconds, double seconds_per_flop) {
  double through = 0.0, passed = work.teacher * seconds_per_flop, waited = 0.0;
  for (size_t b = 0; b < seconds.size(); ++b) {
    through += seconds[b];
    waited += std::max(0.0, through - passed);
    passed = std::max(passed, through) + work.buckets[b].forward() * seconds_per_flop;
  }
  return waited;
}

// Rows of Muon's matrices go to the ranks that compute them, and directions back: bytes of each way, headers of both.
struct MuonTraffic {
  int64_t sent = 0, between_hosts = 0, busiest = 0, control = 0;
  double seconds = 0.0;  // both ways, of the rank that needs most
};
MuonTraffic muon_traffic(const RunConfig& config, const PrecisionPlan& plan, const Layout& layout, const Hosts& hosts) {
  const auto matrices = muon_matrices(layout, static_cast<int>(config.parallel.data), config.parallel.ranks());
  const int64_t world = config.parallel.world();
  MuonTraffic out;
  if (matrices.empty() || world == 1) return out;
  std::vector<Moved> moved(static_cast<size_t>(world));
  for (const MuonMatrix& matrix : matrices) {
    const int64_t row = layout.parameters()[matrix.parameter].shape[1] * dtype_bytes(plan.compute());
    for (const MuonMatrix::Piece& piece : matrix.pieces) {
      if (piece.rank == matrix.owner) continue;
      const int64_t bytes = (piece.end - piece.begin) * row;
      const bool here = hosts.of(piece.rank) == hosts.of(matrix.owner);
      Moved &from = moved[static_cast<size_t>(piece.rank)], &to = moved[static_cast<size_t>(matrix.owner)];
      (here ? from.sent_inside : from.sent_between) += bytes;
      (here ? to.received_inside : to.received_between) += bytes;
      out.sent += bytes;
      if (!here) out.between_hosts += bytes;
    }
  }
  for (const Moved& each : moved)
    out.busiest = std::max({out.busiest, each.sent_inside + each.sent_between, each.received_inside + each.received_between});
  out.seconds = 2 * exchange_seconds(hosts, moved);
  out.control = 2 * world * (world - 1) * kHeaderBytes;
  return out;
}

DryPass exchanges_of_pass(const RunConfig& config, const PrecisionPlan& plan) {
  return config.parallel.ranks().several() ? dry_pass(config, plan) : DryPass{};
}

}  // namespace

StepBytes step_bytes(const RunConfig& config, const PrecisionPlan& plan, int64_t ranks_per_host) {
  const Layout layout = layout_of(config, plan);
  const int64_t data = config.parallel.data, tensor = config.parallel.tensor, world = config.parallel.world();
  StepBytes out{.sent = {}, .buckets = static_cast<int64_t>(layout.buckets().size())};
  if (world == 1) return out;
  const DryPass pass = exchanges_of_pass(config, plan);
  const int64_t replicas = data * *config.training.grad_accum;  // micro batches of all
  const int64_t groups = replicas / config.parallel.expert;     // each of one of every rank that shares experts
  const Hosts hosts(config, ranks_per_host);
  const double crossing_tensor = sums_and_gathers(hosts, hosts.tensor_groups()).crossing,
               crossing_experts = all_to_all(hosts, hosts.expert_groups()).crossing;
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
    out.between_hosts.gradients += static_cast<int64_t>(crossing_tensor * static_cast<double>(2 * (tensor - 1) * summed));
    if (hosts.several()) {
      const auto gradients = owned_bytes(shares, &Layout::Share::gradients), gathered = owned_bytes(shares, &Layout::Share::gathered);
      for (const SpacedRanks& group : hosts.holders(layout.expert_ranks(bucket))) {
        const std::vector<int64_t> on_hosts = hosts.on_hosts(group);
        out.between_hosts.gradients += crossing_bytes(SharesOnHosts(gradients, on_hosts).sum());
        out.between_hosts.parameters += crossing_bytes(SharesOnHosts(gathered, on_hosts).gather());
      }
    }
    const std::span<const ParameterSpec> parameters(layout.parameters());
    const int64_t trained = std::ranges::count_if(parameters.subspan(bucket.first, bucket.last - bucket.first), &ParameterSpec::trained);
    const int64_t sums = bucket.of_experts ? trained : std::min<int64_t>(trained, 1);  // each of its parameters by itself
    calls += (ranks > 1 && trained > 0 ? sums + 1 : 0) + (summed > 0 ? 1 : 0);
    out.busiest += busiest(shares, tensor).all();
  }
  const MuonTraffic muon = muon_traffic(config, plan, layout, hosts);
  out.sent.gradients += muon.sent, out.sent.parameters += muon.sent;
  out.between_hosts.gradients += muon.between_hosts, out.between_hosts.parameters += muon.between_hosts;
  out.busiest += 2 * muon.busiest;
  out.sent.control += muon.control;
  out.busiest += *config.training.grad_accum * (pass.tensor.busiest + pass.experts.busiest);
  out.sent.activations = replicas * pass.tensor.bytes + tensor * groups * pass.experts.bytes;
  out.between_hosts.activations = static_cast<int64_t>(crossing_tensor * static_cast<double>(replicas * pass.tensor.bytes) +
                                                       crossing_experts * static_cast<double>(tensor * groups * pass.experts.bytes));
  out.sent.control += control_bytes(config, plan.buffers(), norm_blocks) + calls * world * kHeaderBytes + replicas * pass.tensor.control +
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
  const Hosts hosts(config, rates);
  const int64_t tensor = config.parallel.tensor, micro_batches = *config.training.grad_accum;
  const double tokens = static_cast<double>(config.training.micro_batch_size * config.training.seq_len) / static_cast<double>(tensor);
  StepTime out;
  double flops = work.tied_head.once + work.tied_head.again + work.teacher;  // FLOPs of a token
  for (const auto& bucket : work.buckets) flops += bucket.once + bucket.again;
  if (rates.flops) out.compute = flops * tokens * static_cast<double>(micro_batches) / *rates.flops;
  const bool sends = config.parallel.world() > 1;
  if (sends && ((!rates.link && rates.ranks_per_host != 1) || (!rates.host_link && hosts.several()))) return out;
  const auto seconds = [](int64_t bytes, const Exchanged& by) { return static_cast<double>(bytes) * by.seconds; };
  const Exchanged by_tensor = sums_and_gathers(hosts, hosts.tensor_groups()), by_experts = all_to_all(hosts, hosts.expert_groups());
  std::vector<double> exchange, gather;
  for (const Layout::Bucket& bucket : layout.buckets()) {
    const std::vector<Layout::Share> shares = shares_of(config, layout, bucket);
    const BucketSeconds held = bucket_seconds(hosts, shares, layout.expert_ranks(bucket));
    exchange.push_back(held.gradients + seconds(partial_bytes(shares, tensor), by_tensor));
    gather.push_back(held.gathered);
  }
  const double muon = muon_traffic(config, plan, layout, hosts).seconds;
  out.exchange = std::accumulate(exchange.begin(), exchange.end(), muon);
  out.gather = std::accumulate(gather.begin(), gather.end(), 0.0);
  const DryPass pass = exchanges_of_pass(config, plan);
  out.activations = seconds(micro_batches * pass.tensor.busiest, by_tensor) + seconds(micro_batches * pass.experts.busiest, by_experts);
  if (!rates.flops) return out;
  const bool beside = tensor == 1 && config.parallel.expert == 1;
  out.exchange_not_hidden = beside ? exchange_not_hidden(work, exchange, tokens / *rates.flops) + muon : *out.exchange;
  out.gather_not_hidden = beside ? gather_not_hidden(work, gather, tokens / *rates.flops) : *out.gather;
  out.step = *out.compute + *out.activations + *out.exchange_not_hidden + *out.gather_not_hidden;
  return out;
}

RunPrice run_price(int64_t steps, int64_t ranks, double step_seconds) {
  const double seconds = static_cast<double>(steps) * step_seconds;
  return {.seconds = seconds, .rank_hours = seconds * static_cast<double>(ranks) / 3600};
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
  const bool quantizes = std::ranges::any_of(plan.modules(), [](const ModulePrecision& entry) { return entry.recipe.quantizes(); });
  if (config.training.teacher == "self" && config.training.teacher_weight == 1.0 && !quantizes && !config.model.moe)
    warnings.emplace_back("training.teacher: self, and no module is quantized: the model is its teacher, so there is nothing to learn");
  if (config.teacher_path() && !config.teacher)
    warnings.push_back(text("training.teacher: ", *config.teacher_path(), " is not there, so nothing here counts a teacher"));
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
