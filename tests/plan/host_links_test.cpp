// Ranks on several hosts: what crosses between them, and what it takes, against a count over all pairs of ranks.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "mantissa/base/integers.h"
#include "mantissa/train/load_config.h"
#include "nn/modules.h"
#include "nn/shards.h"
#include "plan/cost.h"
#include "plan/memory.h"
#include "testing.h"

namespace mantissa::host_links_test {

using Sets = std::vector<std::string>;

RunConfig config_of(int64_t ranks, Sets sets) {
  const std::string text = R"({"model": {"vocab_size": 512, "hidden_size": 128, "num_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 256, "max_position_embeddings": 64}, "training": {"seq_len": 64, "micro_batch_size": 2, "grad_accum": 3},
    "data": {"path": "none"}})";
  return load_run_config({.file = "c.json", .text = text, .set_files = {}, .sets = std::move(sets)}, Inputs::unchecked, ranks).config;
}

const Sets kExperts = {"model.moe={\"num_experts\": 8, \"num_experts_per_tok\": 2, \"intermediate_size\": 64}", "parallel.expert=2"};

// Bytes that a rank sends and receives, on its host and beyond.
struct Moved {
  double sent[2] = {0, 0}, received[2] = {0, 0};
  double seconds(const Rates& rates) const {
    const auto of = [&](const double* bytes) { return bytes[0] / *rates.link + bytes[1] / *rates.host_link; };
    return std::max(of(sent), of(received));
  }
};

// An exchange in which rank `from` sends `bytes(from, to)` to each.
template <class Bytes>
std::vector<Moved> moved(int64_t world, int64_t per_host, const Bytes& bytes) {
  std::vector<Moved> out(static_cast<size_t>(world));
  for (int64_t from = 0; from < world; ++from) {
    for (int64_t to = 0; to < world; ++to) {
      if (from == to) continue;
      const auto where = static_cast<size_t>(from / per_host != to / per_host);
      out[static_cast<size_t>(from)].sent[where] += static_cast<double>(bytes(from, to));
      out[static_cast<size_t>(to)].received[where] += static_cast<double>(bytes(from, to));
    }
  }
  return out;
}

// Ranks of a run that sum and gather together, on hosts of so many ranks.
struct Group {
  std::vector<int64_t> ranks;
  int64_t per_host;

  int64_t host(size_t i) const { return ranks[i] / per_host; }
  size_t place(size_t i) const {
    size_t before = 0;
    while (before < i && host(i - before - 1) == host(i)) ++before;
    return before;
  }
  bool receives(size_t i, size_t root) const {  // the share of a rank of another host
    size_t there = 0;
    for (size_t j = 0; j < ranks.size(); ++j) there += host(j) == host(i) ? 1U : 0U;
    return host(i) != host(root) && place(i) == place(root) % there;
  }
  size_t block() const {
    size_t out = 1;
    if (host(0) == host(ranks.size() - 1)) return out;
    const auto divides = [&](size_t size) {
      for (size_t i = 0; i < ranks.size(); ++i) {
        if (ranks.size() % size != 0 || host(i) != host(i / size * size)) return false;
      }
      return true;
    };
    while (divides(2 * out)) out *= 2;
    return out;
  }

  // Return what one sends to another so that each gets the sum of its share, or the shares of all.
  template <class Share>
  int64_t summed(size_t from, size_t to, const Share& share) const {
    const size_t size = block();
    if (from / size != to / size) return from % size == to % size ? share(ranks[to]) : 0;
    int64_t bytes = 0;
    for (size_t i = to % size; i < ranks.size(); i += size) bytes += share(ranks[i]);
    return bytes;
  }
  template <class Share>
  int64_t gathered(size_t from, size_t to, const Share& share) const {
    if (host(from) != host(to)) return receives(to, from) ? share(ranks[from]) : 0;
    int64_t bytes = share(ranks[from]);
    for (size_t i = 0; i < ranks.size(); ++i) bytes += receives(from, i) ? share(ranks[i]) : 0;
    return bytes;
  }
};

enum class By { sum, gather };
// Returns the exchange of all groups of ranks that are `alike`, with these shares.
template <class Alike, class Share>
std::vector<Moved> exchanged(By how, int64_t world, int64_t per_host, const Alike& alike, const Share& share) {
  std::vector<Group> group_of;
  for (int64_t r = 0; r < world; ++r) {
    Group& group = group_of.emplace_back(Group{.ranks = {}, .per_host = per_host});
    for (int64_t other = 0; other < world; ++other) {
      if (alike(r, other)) group.ranks.push_back(other);
    }
  }
  return moved(world, per_host, [&](int64_t from, int64_t to) -> int64_t {
    if (!alike(from, to)) return 0;
    const Group& group = group_of[static_cast<size_t>(from)];
    const auto index = [&](int64_t rank) { return static_cast<size_t>(std::ranges::find(group.ranks, rank) - group.ranks.begin()); };
    return how == By::sum ? group.summed(index(from), index(to), share) : group.gathered(index(from), index(to), share);
  });
}

double slowest(const std::vector<Moved>& all, const Rates& rates) {
  double most = 0.0;
  for (const Moved& rank : all) most = std::max(most, rank.seconds(rates));
  return most;
}
double crossing(const std::vector<Moved>& all) {
  double sum = 0.0;
  for (const Moved& rank : all) sum += rank.sent[1];
  return sum;
}

struct Expected {
  double exchange = 0.0, gather = 0.0, activations = 0.0;                                  // seconds
  double crossing_gradients = 0.0, crossing_parameters = 0.0, crossing_activations = 0.0;  // bytes
};

Expected counted(const RunConfig& config, const Rates& rates) {
  const PrecisionPlan plan = resolve_plan(config);
  const Layout layout(parameter_specs(plan, config.parallel.ranks(), config.training.expert_gradients()),
                      Shards::bucket_bytes(config.parallel.data));
  const int64_t world = config.parallel.world(), tensor = config.parallel.tensor, per_host = rates.ranks_per_host;
  const auto replica = [&](int64_t rank) { return rank / tensor; };
  const auto same_part = [&](int64_t a, int64_t b) { return a % tensor == b % tensor; };
  // Sums and gathers of tensor ranks, in each of which a rank moves half of these bytes.
  const auto of_tensor = [&](double bytes) {
    struct {
      double seconds = 0.0, crossing = 0.0;
    } out;
    if (tensor == 1) return out;
    for (const By how : {By::sum, By::gather}) {
      const auto unit = exchanged(
          how, world, per_host, [&](int64_t a, int64_t b) { return replica(a) == replica(b); }, [](int64_t) { return 1; });
      out.seconds += slowest(unit, rates) * bytes / static_cast<double>(2 * (tensor - 1));
      out.crossing += crossing(unit) * bytes / static_cast<double>(2 * (tensor - 1));
    }
    return out;
  };
  Expected out;
  for (const Layout::Bucket& bucket : layout.buckets()) {
    const int64_t experts = layout.expert_ranks(bucket);
    const std::vector<Layout::Share> shares = layout.shares(bucket, static_cast<int>(config.parallel.data / experts));
    const auto share = [&](int64_t rank) { return shares[static_cast<size_t>(replica(rank) / experts)]; };
    const auto alike = [&](int64_t a, int64_t b) { return same_part(a, b) && replica(a) % experts == replica(b) % experts; };
    int64_t partial = 0;
    for (const Layout::Share& each : shares) partial = std::max(partial, each.partial);
    const auto gradients = exchanged(By::sum, world, per_host, alike, [&](int64_t rank) { return share(rank).gradients; });
    const auto gathered = exchanged(By::gather, world, per_host, alike, [&](int64_t rank) { return share(rank).gathered; });
    out.exchange += slowest(gradients, rates) + of_tensor(static_cast<double>(2 * ceil_div(partial * (tensor - 1), tensor))).seconds;
    out.gather += slowest(gathered, rates);
    out.crossing_gradients += crossing(gradients);
    out.crossing_parameters += crossing(gathered);
    for (const Layout::Share& each : shares) {  // the tensor ranks of one replica; of all, as many
      const double moved = 2.0 * static_cast<double>(each.partial * (tensor - 1)) / static_cast<double>(tensor);
      out.crossing_gradients += of_tensor(moved).crossing / static_cast<double>(shares.size());
    }
  }
  const DryPass pass = dry_pass(config, plan);
  const double micro = static_cast<double>(*config.training.grad_accum);
  const auto activations = [&](const Exchanges& exchanges, int64_t group, const auto& together) {
    if (group == 1) return;
    const auto each = [&](double bytes) {
      return moved(world, per_host, [&, bytes](int64_t from, int64_t to) { return together(from, to) ? bytes : 0.0; });
    };
    out.activations += slowest(each(micro * static_cast<double>(exchanges.busiest) / static_cast<double>(group - 1)), rates);
    out.crossing_activations += crossing(each(micro * static_cast<double>(exchanges.bytes) / static_cast<double>(group * (group - 1))));
  };
  const auto by_tensor = of_tensor(micro * static_cast<double>(pass.tensor.busiest));
  out.activations += by_tensor.seconds;
  out.crossing_activations += of_tensor(micro * static_cast<double>(pass.tensor.bytes) / static_cast<double>(tensor)).crossing;
  activations(pass.experts, config.parallel.expert, [&](int64_t a, int64_t b) {
    return same_part(a, b) && replica(a) / config.parallel.expert == replica(b) / config.parallel.expert;
  });
  return out;
}

TEST(HostLinks, AreUsedAsPairsOfRanksCount) {
  const Sets with_experts_and_tensor = [] {
    Sets all = kExperts;
    all.emplace_back("parallel.tensor=2");
    return all;
  }();
  for (const auto& [ranks, sets] : {std::pair(4, Sets{}),
                                    {8, {"parallel.tensor=2"}},
                                    {8, {"parallel.tensor=4", "parallel.sequence_parallel=true"}},
                                    {8, kExperts},
                                    {16, with_experts_and_tensor}}) {
    const RunConfig config = config_of(ranks, sets);
    const PrecisionPlan plan = resolve_plan(config);
    for (const int64_t per_host : {1, 2, 3, 4, ranks / 2, ranks - 1}) {
      const Rates rates{.flops = 1e12, .link = 1e9, .host_link = 1e8, .ranks_per_host = per_host};
      SCOPED_TRACE(text(ranks, " ranks, ", per_host, " on a host, ", joined(sets)));
      const Expected expected = counted(config, rates);
      const StepTime time = step_time(config, plan, rates);
      EXPECT_NEAR(*time.exchange, expected.exchange, 1e-9 * expected.exchange);
      EXPECT_NEAR(*time.gather, expected.gather, 1e-9 * expected.gather);
      EXPECT_NEAR(*time.activations, expected.activations, 1e-9 * expected.activations + 1e-15);
      const Traffic between = step_bytes(config, plan, per_host).between_hosts;
      const auto buckets = static_cast<double>(step_bytes(config, plan).buckets);
      EXPECT_NEAR(static_cast<double>(between.gradients), expected.crossing_gradients, buckets + 1);  // each is a whole number
      EXPECT_NEAR(static_cast<double>(between.parameters), expected.crossing_parameters, 1);
      EXPECT_NEAR(static_cast<double>(between.activations), expected.crossing_activations, 1);
    }
  }
}

TEST(HostLinks, DoNotMatterOnOneHost) {
  const RunConfig config = config_of(8, {"parallel.tensor=2"});
  const PrecisionPlan plan = resolve_plan(config);
  const StepTime one = step_time(config, plan, {.flops = 1e12, .link = 1e9});
  for (const int64_t per_host : {0, 8, 64}) {
    const StepTime time = step_time(config, plan, {.flops = 1e12, .link = 1e9, .host_link = 1.0, .ranks_per_host = per_host});
    EXPECT_DOUBLE_EQ(*time.step, *one.step) << per_host;
    EXPECT_EQ(step_bytes(config, plan, per_host).between_hosts.gradients, 0);
  }
}

TEST(HostLinks, OfRanksAloneOnTheirHostsCarryAll) {
  for (const Sets& sets : {Sets{}, Sets{"parallel.tensor=2"}, kExperts}) {
    const RunConfig config = config_of(4, sets);
    const PrecisionPlan plan = resolve_plan(config);
    const StepBytes bytes = step_bytes(config, plan, 1);
    EXPECT_EQ(bytes.between_hosts.gradients, bytes.sent.gradients);
    EXPECT_EQ(bytes.between_hosts.parameters, bytes.sent.parameters);
    EXPECT_EQ(bytes.between_hosts.activations, bytes.sent.activations);
    const StepTime time = step_time(config, plan, {.flops = 1e12, .link = {}, .host_link = 1e9, .ranks_per_host = 1});
    EXPECT_NEAR(time.step.value(), step_time(config, plan, {.flops = 1e12, .link = 1e9}).step.value(), 1e-12) << "no other link is needed";
  }
}

// Neighbors share a host: tensor ranks first, then those that share experts.
TEST(HostLinks, CarryNoActivationsOfGroupsWithinAHost) {
  const auto crossing = [](const Sets& sets) {
    const RunConfig config = config_of(8, sets);
    return step_bytes(config, resolve_plan(config), 2).between_hosts.activations;
  };
  EXPECT_EQ(crossing({"parallel.tensor=2"}), 0);
  EXPECT_EQ(crossing(kExperts), 0);
  EXPECT_GT(crossing({"parallel.tensor=4"}), 0);
}

TEST(HostLinks, AreNotInvented) {
  const RunConfig config = config_of(4, {});
  const StepTime time = step_time(config, resolve_plan(config), {.flops = 1e12, .link = 1e9, .ranks_per_host = 2});
  EXPECT_TRUE(time.compute);
  EXPECT_FALSE(time.exchange || time.step);
}

TEST(RunPrice, IsThatOfAllStepsOnAllRanks) {
  const RunPrice price = run_price(7200, 4, 0.5);
  EXPECT_DOUBLE_EQ(price.seconds, 3600);
  EXPECT_DOUBLE_EQ(price.rank_hours, 4);
}

}  // namespace mantissa::host_links_test
