#include "mantissa/plan/estimate.h"

#include <algorithm>

#include "config/open_device.h"
#include "nn/modules.h"
#include "nn/shards.h"
#include "optim/accumulation.h"
#include "plan/dry_pass.h"

namespace mantissa {
namespace {

// Peaks of processes on x86-64 beyond their tensors hardly depend on the model: 28 to 29 MiB alone, 37 to 39 MiB of 2 to 8 ranks, without
// huge pages. These add 3 to 5 MiB: the end of a block that is not used belongs to a page that is.
constexpr int64_t kProgramBytes = int64_t{28} << 20, kTransportBytes = int64_t{10} << 20;

// Caps sizes that no machine has, so that nothing wraps.
int64_t bytes(double count) { return static_cast<int64_t>(std::min(count, 1e18)); }

// Counts weights, their gradients and moments.
void add_parameters(const RunConfig& config, const PrecisionPlan& plan, MemoryEstimate& estimate) {
  const Layout layout(parameter_specs(plan, config.parallel.ranks(), config.training.expert_gradients()), Shards::kBucketBytes);
  const auto ranks = static_cast<int>(std::max<int64_t>(1, config.parallel.data));
  struct Own {
    int64_t masters = 0, moments = 0;
    int64_t all() const { return masters + moments; }
  };
  std::vector<Own> owned(static_cast<size_t>(ranks));
  int64_t largest = 0;
  for (const Layout::Bucket& bucket : layout.buckets()) {
    const int apart = layout.expert_ranks(bucket);
    const std::vector<Layout::Share> shares = layout.shares(bucket, ranks / apart);
    for (size_t r = 0; r < owned.size(); ++r) {
      const Layout::Share& share = shares[r / static_cast<size_t>(apart)];
      owned[r].masters += share.masters;
      owned[r].moments += share.moments;
      largest = std::max(largest, share.gradients * (std::ssize(shares) - 1));
    }
  }
  const Own most = *std::ranges::max_element(owned, {}, &Own::all);
  const Layout::Totals& all = layout.totals();
  const int64_t buffers = GradientAccumulator::buffers(config.training.accumulation, *config.training.grad_accum);
  estimate.masters = bytes(static_cast<double>(all.fp32_values) + static_cast<double>(most.masters));
  estimate.values = bytes(static_cast<double>(all.other_values + all.codes + all.copies + 4 * plan.buffers()));
  estimate.gradients = bytes(static_cast<double>(all.gradients) * static_cast<double>(buffers));
  estimate.optimizer = bytes(static_cast<double>(most.moments));
  estimate.exchange = bytes(static_cast<double>(largest));
}

}  // namespace

MemoryEstimate estimate_memory(const RunConfig& config, const PrecisionPlan& plan) {
  const DryPass pass = dry_pass(config, plan);
  MemoryEstimate estimate;
  add_parameters(config, plan, estimate);
  estimate.activations = pass.activations;
  estimate.workspace = pass.workspace;
  if (backend_name(config.training.device) == "cuda") {
    constexpr int64_t kLanes = 2, kBytesPerToken = 4 * 4;  // tokens, targets, positions and segment starts, i32
    const ParallelConfig& parallel = config.parallel;
    const double tokens = static_cast<double>(config.training.tokens_per_step()) / static_cast<double>(std::max<int64_t>(1, parallel.data));
    // The group of all ranks, and each kind of group that is smaller.
    const int64_t expert_data = parallel.expert > 1 ? parallel.data / parallel.expert : 1, world = parallel.world();
    const int64_t sizes[] = {parallel.tensor, parallel.data, parallel.expert, expert_data};
    const int64_t groups = (world > 1 ? 1 : 0) + std::ranges::count_if(sizes, [&](int64_t size) { return size > 1 && size < world; });
    estimate.inputs = bytes(kBytesPerToken * tokens);
    estimate.cuda_context = kCudaContext;
    estimate.cublaslt = kLanes * kGemmWorkspace;
    estimate.nccl = groups * kNcclGroup;
  } else {
    estimate.program = kProgramBytes + (config.parallel.world() > 1 ? kTransportBytes : 0);
  }
  return estimate;
}

}  // namespace mantissa
