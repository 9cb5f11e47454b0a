#include "plan/memory_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/gpus.h"
#include "comm/mesh.h"
#include "mantissa/base/text.h"
#include "mantissa/plan/estimate.h"

namespace mantissa {
namespace {

// Names the parts of a MemoryEstimate, with the keys that change them most.
struct NamedPart {
  const char* name;
  int64_t bytes;
  std::string keys;
};

std::vector<NamedPart> largest_parts(const RunConfig& config, const MemoryEstimate& memory) {
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
                                  {"inputs", memory.inputs, "training.global_batch_size, training.seq_len"}};
  constexpr size_t kShown = 3;
  std::ranges::stable_sort(parts, std::ranges::greater{}, &NamedPart::bytes);
  parts.resize(kShown);
  std::erase_if(parts, [](const NamedPart& part) { return part.bytes == 0; });
  return parts;
}

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
  for (const NamedPart& part : largest_parts(config, memory)) out += text('\n', part.name, ' ', bytes_text(part.bytes), ": ", part.keys);
  if (ranks > 1) out += text("\nor fewer ranks on one ", holder == Holder::host ? "host" : "GPU");
  return out + "\ntraining.allow_memory_overcommit=true trains all the same";
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
