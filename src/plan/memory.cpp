#include "plan/memory.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/dry_backend.h"
#include "backend/gpus.h"
#include "comm/mesh.h"
#include "config/open_device.h"
#include "config/training_options.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/text.h"
#include "models/model_shape.h"
#include "nn/modules.h"
#include "nn/shards.h"
#include "optim/accumulation.h"
#include "optim/muon.h"

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
  const Mesh mesh{.tensor = tensor.ranks, .expert = experts.ranks, .sequence_parallel = config.parallel.sequence_parallel};
  const std::unique_ptr<Gpt> teacher = make_teacher(config, *device, mesh);
  Gpt model(config.model, *device, plan, training_options(config, mesh));
  model.parameters().reset_gradients();
  const auto in_use = [&] { return device->allocator_stats().in_use; };
  const Tensor ids = empty(*device, Dtype::i32, {rows.tokens()});
  RouterStatistics routing(RouterFigures::counts, config.model.expert_layers() * *config.training.grad_accum);  // stays for the step
  const auto forward_and_backward = [&] {
    Tape tape;
    const Tape::Scope scope(&tape);
    const Var loss = model.loss({.batch = rows.sequences, .tokens = ids, .positions = ids, .segment_starts = {}}, ids, rows.tokens(),
                                &routing, teaching(config, teacher.get()));
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

}  // namespace

DryPass dry_pass(const RunConfig& config, const PrecisionPlan& plan) {
  const Rows all{.sequences = config.training.micro_batch_size, .length = config.training.seq_len};
  if (all.tokens() <= kMostTokens) return run(config, plan, all);
  const int64_t length = std::min(all.length, kMostTokens), sequences = std::min(all.sequences, kMostTokens / length);
  const Rows many{.sequences = sequences, .length = length};
  const Rows few = sequences > 1 ? Rows{.sequences = sequences / 2, .length = length} : Rows{.sequences = 1, .length = length / 2};
  const double factor = static_cast<double>(all.tokens() - many.tokens()) / static_cast<double>(many.tokens() - few.tokens());
  // Extrapolates linearly, up to sizes that no machine has.
  const DryPass of_few = run(config, plan, few), of_many = run(config, plan, many);
  const auto line = [factor](int64_t a, int64_t b) {
    return static_cast<int64_t>(std::min(static_cast<double>(b) + static_cast<double>(b - a) * factor, 1e18));
  };
  const auto lines = [&](const Exchanges& a, const Exchanges& b) {
    return Exchanges{.bytes = line(a.bytes, b.bytes), .control = line(a.control, b.control), .busiest = line(a.busiest, b.busiest)};
  };
  return {.activations = line(of_few.activations, of_many.activations),
          .workspace = line(of_few.workspace, of_many.workspace),
          .tensor = lines(of_few.tensor, of_many.tensor),
          .experts = lines(of_few.experts, of_many.experts)};
}

namespace {

// Peaks of processes on x86-64 beyond their tensors hardly depend on the model: 28 to 29 MiB alone, 37 to 39 MiB of 2 to 8 ranks, without
// huge pages. These add 3 to 5 MiB: the end of a block that is not used belongs to a page that is.
constexpr int64_t kProgramBytes = int64_t{28} << 20, kTransportBytes = int64_t{10} << 20;

// Caps sizes that no machine has, so that nothing wraps.
int64_t bytes(double count) { return static_cast<int64_t>(std::min(count, 1e18)); }

// Counts the weights of the teacher on a rank.
int64_t teacher_bytes(const RunConfig& config) {
  if (!config.teacher) return 0;
  const RunConfig teacher = teacher_config(config);
  const PrecisionPlan plan = resolve_plan(teacher);
  const Layout::Totals all = Layout(parameter_specs(plan, teacher.parallel.ranks()), Shards::bucket_bytes(1)).totals();
  return bytes(static_cast<double>(all.fp32_values + all.other_values + 4 * plan.buffers()));
}

// Counts weights, their gradients and moments.
void add_parameters(const RunConfig& config, const PrecisionPlan& plan, MemoryEstimate& estimate) {
  const Layout layout(parameter_specs(plan, config.parallel.ranks(), config.training.expert_gradients()),
                      Shards::bucket_bytes(config.parallel.data));
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
  estimate.optimizer = bytes(static_cast<double>(most.moments) * static_cast<double>(dtype_bytes(config.optimizer.moments)) / 4);
  estimate.exchange = bytes(static_cast<double>(largest));
}

int64_t optimizer_workspace(const RunConfig& config, const PrecisionPlan& plan) {
  const Layout layout(parameter_specs(plan, config.parallel.ranks(), config.training.expert_gradients()),
                      Shards::bucket_bytes(config.parallel.data));
  const auto data = static_cast<int>(std::max<int64_t>(1, config.parallel.data));
  return muon_workspace(layout, muon_matrices(layout, data, config.parallel.ranks()), data * config.parallel.tensor, plan.compute());
}

double forward_flops_per_token(const ModelConfig& model, int64_t seq_len) {
  return training_flops_per_token(model_shape(model), seq_len) / 3;
}

double teacher_flops_per_token(const RunConfig& config) {
  return config.teacher ? forward_flops_per_token(*config.teacher, config.training.seq_len) : 0.0;
}

}  // namespace

double step_flops_per_token(const RunConfig& config) {
  return training_flops_per_token(model_shape(config.model), config.training.seq_len) + teacher_flops_per_token(config);
}

double evaluation_flops_per_token(const RunConfig& config) {
  return forward_flops_per_token(config.model, config.training.seq_len) + teacher_flops_per_token(config);
}

MemoryEstimate estimate_memory(const RunConfig& config, const PrecisionPlan& plan) {
  const DryPass pass = dry_pass(config, plan);
  MemoryEstimate estimate;
  add_parameters(config, plan, estimate);
  estimate.activations = pass.activations;
  // The optimizer needs its own when that of the passes is free again.
  estimate.workspace = std::max(pass.workspace, optimizer_workspace(config, plan) - pass.activations);
  estimate.teacher = teacher_bytes(config);
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
    if (config.training.attention == AttentionBy::cudnn)
      estimate.workspace = bytes(static_cast<double>(estimate.workspace) + attention_workspace(config.attention_form()));
    estimate.nccl = groups * kNcclGroup;
  } else {
    estimate.program = kProgramBytes + (config.parallel.world() > 1 ? kTransportBytes : 0);
  }
  return estimate;
}

namespace {

enum class Holder { host, gpu };

// Returns the bytes that a rank has yet to allocate: contexts and groups of ranks are made before free memory is asked for.
int64_t needed(const MemoryEstimate& memory, Holder holder) {
  return holder == Holder::host ? memory.tensors() : memory.total() - memory.cuda_context - memory.nccl;
}

std::string refusal(const RunConfig& config, const MemoryEstimate& memory, const FreeMemory& free, int64_t ranks, Holder holder) {
  const int64_t each = needed(memory, holder);
  const int64_t all = static_cast<int64_t>(std::min(static_cast<double>(each) * static_cast<double>(ranks), 9e18));
  std::string out =
      text("not enough memory: training needs ", bytes_text(all),
           ranks > 1 ? text(", ", bytes_text(each), " on each of ", ranks, " ranks here") : "", ", and ", bytes_text(free.bytes), " of ",
           free.of, " are free; the largest parts", ranks > 1 ? " of a rank" : "", " and what makes them smaller:");
  struct NamedPart {
    const char* name;
    int64_t bytes;
    std::string keys;  // that change it most
  };
  const std::string model = "model.num_layers, model.hidden_size, model.intermediate_size",
                    rows = "training.micro_batch_size, training.seq_len";
  const bool recomputes = config.training.recompute == Recompute::full,
             tree = config.training.accumulation == Accumulation::tree && *config.training.grad_accum > 1;
  std::vector<NamedPart> parts = {{"master weights", memory.masters, model},
                                  {"weights", memory.values, model},
                                  {"gradients", memory.gradients, tree ? "training.accumulation=running, " + model : model},
                                  {"optimizer", memory.optimizer, model},
                                  {"activations", memory.activations, recomputes ? rows : "training.recompute=full, " + rows},
                                  {"workspace", memory.workspace, rows},
                                  {"exchange", memory.exchange, "parallel.data"},
                                  {"inputs", memory.inputs, "training.global_batch_size, training.seq_len"},
                                  {"teacher", memory.teacher, "training.teacher, parallel.tensor"}};
  constexpr size_t kShown = 3;
  std::ranges::stable_sort(parts, std::ranges::greater{}, &NamedPart::bytes);
  parts.resize(kShown);
  std::erase_if(parts, [](const NamedPart& part) { return part.bytes == 0; });
  for (const NamedPart& part : parts) out += text('\n', part.name, ' ', bytes_text(part.bytes), ": ", part.keys);
  if (ranks > 1) out += text("\nor fewer ranks on one ", holder == Holder::host ? "host" : "GPU");
  return out + "\ntraining.allow_memory_overcommit=true starts the run anyway";
}

void require_room(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world, const std::vector<FreeMemory>& free,
                  Holder holder) {
  if (config.training.allow_memory_overcommit) return;
  std::string own_places;
  for (const FreeMemory& here : free) own_places.append(reinterpret_cast<const char*>(&here.place), sizeof here.place);
  std::vector<std::vector<uint64_t>> all;  // hosts and control groups of every rank, by rank
  for (const std::string& bytes : all_gather_strings(world, own_places)) {
    std::vector<uint64_t>& places = all.emplace_back(bytes.size() / sizeof(uint64_t));
    if (!places.empty()) std::memcpy(places.data(), bytes.data(), bytes.size());
  }
  agree(world, [&] {
    const MemoryEstimate memory = estimate_memory(config, plan);
    const auto own = static_cast<double>(needed(memory, holder));
    double least = HUGE_VAL;
    std::string why;
    for (const FreeMemory& here : free) {
      const int64_t ranks = std::ranges::count_if(all, [&](const auto& places) { return std::ranges::count(places, here.place) > 0; });
      const double each = static_cast<double>(here.bytes) / static_cast<double>(ranks);
      if (each >= own || each >= least) continue;
      least = each;
      why = refusal(config, memory, here, ranks, holder);
    }
    require(why.empty(), ExitCode::environment, why);
  });
}

}  // namespace

void require_free_memory(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world,
                         const std::vector<FreeMemory>& free) {
  require_room(config, plan, world, free, Holder::host);
}

void require_free_gpu_memory(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world,
                             const std::vector<FreeMemory>& free) {
  require_room(config, plan, world, free, Holder::gpu);
}

std::vector<FreeMemory> free_gpu_memory(const Communicator& world) {
  find_gpu(default_gpu());
  world.barrier();  // all contexts are there
  const std::optional<Gpu> gpu = find_gpu(default_gpu());
  if (!gpu) return {};
  return {
      {.bytes = gpu->free, .of = text("GPU ", default_gpu(), ", ", gpu->name, " of ", bytes_text(gpu->memory), ","), .place = gpu->place}};
}

}  // namespace mantissa
