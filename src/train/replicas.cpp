#include "train/replicas.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "backend/ceilings.h"
#include "base/hash.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/error.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

// Some rows to compare, their name, and which rank of a group has the true bytes.
struct Compared {
  std::string name;
  int64_t begin, end;
  int owner;
  uint64_t hash;
};

// Hashes these tensors together, without undefined ones. Those of a device are downloaded in pieces, so that the host needs no room for a
// whole parameter.
Compared compared(std::string name, int64_t begin, int64_t end, int owner, std::initializer_list<Tensor> tensors) {
  StreamHash hash;
  for (const Tensor& tensor : tensors) {
    if (tensor.defined()) for_each_piece(tensor, [&](std::span<const std::byte> piece) { hash.update(piece); });
  }
  return {.name = std::move(name), .begin = begin, .end = end, .owner = owner, .hash = hash.finish().value};
}

Compared weight(const ParameterShard& shard, int owner) {
  const Parameter& parameter = *shard.of;
  const Tensor value = parameter.value().defined() ? shard.of_rows(parameter.value()) : Tensor();
  const QuantizedTensor codes = parameter.quantized ? slice(parameter.codes(), shard.begin, shard.end) : QuantizedTensor();
  return compared(parameter.name, shard.begin, shard.end, owner, {value, codes.codes, codes.scales});
}

// Returns "" if all ranks of the group have the bytes of the owners. world_rank: of a rank of the group.
std::string difference(const Communicator& group, const std::vector<Compared>& rows, const std::function<int(int)>& world_rank) {
  const size_t count = rows.size(), ranks = static_cast<size_t>(group.size());
  std::vector<uint64_t> hashes(count * ranks);  // [rank, rows]
  for (size_t i = 0; i < count; ++i) hashes[static_cast<size_t>(group.rank()) * count + i] = rows[i].hash;
  const std::vector<int64_t> bytes(ranks, static_cast<int64_t>(count * sizeof(uint64_t)));
  group.all_gather(std::as_writable_bytes(std::span(hashes)), bytes, Purpose::control);
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < count; ++i) {
      const Compared& of = rows[i];
      if (hashes[rank * count + i] == hashes[static_cast<size_t>(of.owner) * count + i]) continue;
      return text("rank ", world_rank(static_cast<int>(rank)), " differs from rank ", world_rank(of.owner), " in ", of.name, ", rows ",
                  of.begin, " to ", of.end - 1,
                  ", which that rank owns (training.replica_check_interval): memory or the network corrupted bytes");
    }
  }
  return "";
}

// Compares the parameters that data ranks hold alike, or those that ranks with the same experts hold alike.
std::string among_data_ranks(const Shards& shards, bool of_experts) {
  const Mesh& mesh = shards.mesh();
  const Communicator& group = shards.group(of_experts);
  std::vector<Compared> rows;
  for (int rank = 0; rank < group.size(); ++rank) {
    for (const ParameterShard& shard : shards.of_rank(of_experts, rank)) rows.push_back(weight(shard, rank));
  }
  const int apart = of_experts ? mesh.expert.size() : 1, first = of_experts ? mesh.expert.rank() : 0;
  return difference(group, rows, [&](int rank) { return (rank * apart + first) * mesh.tensor.size() + mesh.tensor.rank(); });
}

}  // namespace

void require_same_replicas(const Optimizer& optimizer, const ParameterSet& parameters) {
  const Mesh& mesh = optimizer.shards().mesh();
  if (mesh.world.size() == 1) return;
  std::string found = among_data_ranks(optimizer.shards(), false);
  const auto or_else = [&found](std::string other) {
    if (found.empty()) found = std::move(other);
  };
  if (mesh.expert.size() > 1) or_else(among_data_ranks(optimizer.shards(), true));
  std::vector<Compared> rows;
  // All ranks hold buffers alike.
  for (const Buffer& of : parameters.buffers()) rows.push_back(compared(of.name, 0, of.shape[0], 0, {of.value}));
  if (!rows.empty()) or_else(difference(mesh.world, rows, [](int rank) { return rank; }));
  rows.clear();
  for (const Optimizer::State& of : optimizer.states()) {  // which tensor ranks hold alike; each checks its own shards
    if (mesh.tensor.size() == 1 || of.shard.of->sharding.split != Split::none) continue;
    rows.push_back(weight(of.shard, 0));
    // The state has the names of a checkpoint.
    for (const auto& [prefix, tensor] : {std::pair{"master.", of.master}, {"m.", of.first_moment}, {"v.", of.second_moment}}) {
      if (tensor.defined())  // frozen ones have no moments
        rows.push_back(compared(prefix + of.shard.of->name, of.shard.begin, of.shard.end, 0, {tensor}));
    }
  }
  or_else(difference(mesh.tensor, rows, [&](int rank) { return mesh.data.rank() * mesh.tensor.size() + rank; }));
  agree(mesh.world, [&] { require(found.empty(), ExitCode::numerical, found); });
}

std::vector<Straggler> Stragglers::add(std::span<const double> seconds) {
  require(seconds.size() == sums_.size(), "stragglers: times of ", seconds.size(), " ranks, and there are ", sums_.size());
  for (size_t rank = 0; rank < sums_.size(); ++rank) sums_[rank] += seconds[rank];
  if (++steps_ < kWindowSteps) return {};
  steps_ = 0;
  const std::vector<double> window = std::exchange(sums_, std::vector<double>(sums_.size()));
  std::vector<double> sorted = window;
  std::ranges::sort(sorted);
  const double median = sorted[(sorted.size() - 1) / 2];  // the lower one of two in the middle, which is the upper one of speeds
  std::vector<Straggler> out;
  for (size_t rank = 0; rank < window.size(); ++rank) {
    const bool slow = median < kSlow * window[rank];
    slow_[rank] = slow ? slow_[rank] + 1 : 0;
    if (slow_[rank] == kWindows) out.push_back({.rank = static_cast<int>(rank), .ratio = median / window[rank]});
  }
  return out;
}

void report_stragglers(Stragglers& stragglers, std::span<const double> seconds, int64_t step, std::optional<Metrics>& metrics) {
  if (seconds.empty() || !metrics) return;
  for (const Straggler& straggler : stragglers.add(seconds)) {
    const StragglerEvent event{.step = step, .rank = straggler.rank, .section = "forward and backward", .ratio = straggler.ratio};
    log_warning("step ", step, ": the others wait for rank ", event.rank, ", whose ", event.section, " ran at less than ",
                Stragglers::kSlow, " of the median speed for ", Stragglers::kWindows * Stragglers::kWindowSteps, " steps; in the last ",
                Stragglers::kWindowSteps, " at ", event.ratio);
    metrics->write(event);
  }
}

void require_equal_places(const Backend& device, const std::string& consequence) {
  const std::string unequal = device.unequal_places();
  require(unequal.empty(), ExitCode::environment, "matmuls on this CPU (", gemm_instruction_set(),
          ") do not give equal operands the same bits at all places and depths of a tile (", unequal, "): ", consequence,
          "; ONEDNN_MAX_CPU_ISA chooses other kernels (SSE41, AVX2, AVX512_CORE, AVX512_CORE_BF16), and mantissa doctor tells whether they "
          "pass");
}

void require_equal_places(const RunConfig& config, const Backend& device) {
  const std::string broken = config.model.moe                ? "the output of an expert for a token would depend on the tokens beside it"
                             : config.parallel.world() > 1   ? "results would depend on the number of ranks"
                             : config.model.pad_vocab_to > 1 ? "results would depend on the padding of the vocabulary"
                                                             : "";
  if (broken.empty()) return;  // nothing relies on equal places
  if (device.gemm_device().architecture > 0) {
    log_info("matmuls: on a GPU it is not measured whether rows and columns have the same bits at every place; if they differ, ", broken);
    return;
  }
  require_equal_places(device, broken);
  log_info("matmuls: rows and columns have the same bits at every place and depth of a tile");
}

}  // namespace mantissa
