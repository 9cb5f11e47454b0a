// Predicts what a step of a run on many ranks sends, and how long it takes, before a rank is started.
//
// The bytes are those that Communicator counts; how many tokens go to which experts is data, and supposed to be balanced. The time is a
// model of five things, with F FLOPs of a rank's step (step_flops_per_token(), and what training.recompute computes
// again), and for each bucket b the seconds x_b and g_b that its gradients and its parameters need on the link of the rank that sends or
// receives most of them:
//
//   compute      F / flops
//   activations  what a rank sends or receives of those that tensor ranks exchange, and of tokens that are dispatched to
//                experts and combined, if each expert gets as many; one exchange after the other; not hidden
//   exchange     the sum of x_b. While the last micro batch's backward pass goes from the last bucket to the first, x_b begins when the
//                pass is through with b and the exchange of the bucket before has ended. What ends after the pass is not hidden. The rows
//                of Muon's matrices, on their ways to the ranks that compute them and back, are part of it, and never hidden.
//   gather       the sum of g_b, from the first bucket on. The next step's first forward pass enters b when g_b has ended; what it waits
//                is not hidden.
//   step         compute + activations + what is not hidden of exchange and gather
//
// Ranks lie on hosts in their order, rank r on host r / ranks_per_host. A byte to a rank on the same host takes 1 / link seconds, one to
// another host 1 / host_link, and a rank sends one after the other. Sums and gathers have the two levels of comm/host_levels.h. Ranks are
// ordered tensor-fastest (comm/mesh.h): so tensor ranks are the first to share a host, next those that share experts, and what data ranks
// send is the first to cross.
//
// With tensor ranks, or ranks that share experts, nothing of exchange and gather is hidden, since an exchange of activations waits until
// what was begun before is through.
//
// The model ignores latency (a bucket takes 2 (R - 1) messages of each rank), stragglers, and the time of the optimizer but for what is in
// `flops`: the rate at which a rank does whole steps, which bench train prints; that of bench gemm is what it can be at best.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// Counts what all ranks send in a step without evaluation, samples, measurements and saves.
struct StepBytes {
  Traffic sent;
  Traffic between_hosts = {};  // the part of it that leaves a host; without control messages
  int64_t buckets = 0;
  int64_t busiest = 0;  // by one rank: the larger of what it sends and receives
};

// Bytes that one gather moves, shares of all ranks together, per element of the parameters that are codes, and of those that are values. 0:
// there are none.
struct GatherBytes {
  double codes = 0.0, values = 0.0;
};

// Rates of each rank: FLOP/s, and bytes/s that it sends while it receives as many, to ranks on its host and, while all ranks of its host do
// the same, to ranks on others.
struct Rates {
  std::optional<double> flops = {}, link = {}, host_link = {};
  int64_t ranks_per_host = 0;  // 0: all
};

// Times in seconds; a member is empty if a rate that it needs is missing.
struct StepTime {
  std::optional<double> compute, activations, exchange, gather, exchange_not_hidden, gather_not_hidden, step;
};

// model.vocab_size must be set; `plan` is that of the config, on its ranks.
StepBytes step_bytes(const RunConfig& config, const PrecisionPlan& plan, int64_t ranks_per_host = 0);
GatherBytes gather_bytes(const RunConfig& config, const PrecisionPlan& plan);
StepTime step_time(const RunConfig& config, const PrecisionPlan& plan, const Rates& rates);

// Price of so many steps of a run on so many ranks, without evaluations, samples and saves.
struct RunPrice {
  double seconds = 0.0, rank_hours = 0.0;
};
RunPrice run_price(int64_t steps, int64_t ranks, double step_seconds);

// Warns of what a run does not do although its configuration may look so.

// Returns the warnings of the plan and those of options that belong together; one sentence each, which begins with the key where there is
// one.
std::vector<std::string> run_warnings(const RunConfig& config, const PrecisionPlan& plan);

}  // namespace mantissa
