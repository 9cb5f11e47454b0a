#include "train/routing_summary.h"

#include <algorithm>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

constexpr size_t kLosses = 3, kBeside = kLosses + 2;  // dropped choices and the number of micro batches

// Of one layer: choices of each expert, those dropped, the losses of each micro batch added up, and how many there were.
struct Sums {
  explicit Sums(size_t experts) : numbers(experts + kBeside, 0.0) {}
  double& dropped() { return numbers[numbers.size() - kBeside]; }
  double* losses() { return &numbers[numbers.size() - kBeside + 1]; }
  double& batches() { return numbers.back(); }

  std::vector<double> numbers;
};

void add(const RoutingRecord& record, int64_t experts, int64_t capacity, Sums& sums) {
  const std::vector<int32_t> counts = to_host<int32_t>(record.counts);
  for (int64_t e = 0; e < experts; ++e) {
    int64_t chosen = 0;
    for (size_t i = static_cast<size_t>(e); i < counts.size(); i += static_cast<size_t>(experts)) chosen += counts[i];
    sums.numbers[static_cast<size_t>(e)] += static_cast<double>(chosen);
    if (capacity > 0) sums.dropped() += static_cast<double>(std::max<int64_t>(0, chosen - capacity));
  }
  sums.batches() += 1.0;
  if (!record.losses.defined()) return;
  const std::vector<double> losses = to_host<double>(record.losses);
  for (size_t i = 0; i < kLosses; ++i) sums.losses()[i] += losses[i];
}

// Over the ranks, in their order, in one exchange.
void add_up(const Communicator& ranks, std::vector<Sums>& layers) {
  if (ranks.size() == 1) return;
  std::vector<double> own, all;
  for (const Sums& layer : layers) own.insert(own.end(), layer.numbers.begin(), layer.numbers.end());
  for (int r = 0; r < ranks.size(); ++r) all.insert(all.end(), own.begin(), own.end());
  const std::vector<int64_t> counts(static_cast<size_t>(ranks.size()), static_cast<int64_t>(own.size() * sizeof(double)));
  ranks.all_gather(std::as_writable_bytes(std::span(all)), counts, Purpose::control);
  for (size_t i = 0; i < own.size(); ++i) {
    double& sum = layers[i / layers[0].numbers.size()].numbers[i % layers[0].numbers.size()];
    sum = 0.0;
    for (size_t at = i; at < all.size(); at += own.size()) sum += all[at];
  }
}

LayerRouting told(Sums sums, int64_t layer, int64_t experts, RouterFigures figures) {
  LayerRouting out{.layer = layer};
  double all = 0.0, most = 0.0;
  for (int64_t e = 0; e < experts; ++e) {
    const double load = sums.numbers[static_cast<size_t>(e)];
    out.load.push_back(static_cast<int64_t>(load));
    all += load;
    most = std::max(most, load);
  }
  out.imbalance = most * static_cast<double>(experts) / all;
  out.dropped = sums.dropped() / all;
  if (figures == RouterFigures::counts) return out;
  out.balance_loss = sums.losses()[0] / sums.batches();
  out.sequence_balance_loss = sums.losses()[1] / sums.batches();
  out.z_loss = sums.losses()[2] / sums.batches();
  return out;
}

}  // namespace

int64_t routing_numbers(const ModelConfig& model) {
  int64_t layers = 0;
  for (int64_t i = 0; i < model.num_layers; ++i) layers += model.has_experts(i) ? 1 : 0;
  return layers == 0 ? 0 : layers * (model.moe->num_experts + static_cast<int64_t>(kBeside));
}

std::vector<LayerRouting> routing_summary(const RoutingTally& tally, const RunConfig& config, const Communicator& ranks) {
  const ModelConfig& model = config.model;
  if (!model.moe) return {};
  const int64_t experts = model.moe->num_experts,
                capacity = model.moe->capacity(config.training.micro_batch_size * config.training.seq_len);
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < model.num_layers; ++i) {
    if (model.has_experts(i)) layers.push_back(i);
  }
  std::vector<Sums> sums(layers.size(), Sums(static_cast<size_t>(experts)));
  for (size_t i = 0; i < tally.records.size(); ++i) add(tally.records[i], experts, capacity, sums[i % layers.size()]);
  add_up(ranks, sums);
  std::vector<LayerRouting> out;
  for (size_t i = 0; i < layers.size(); ++i) out.push_back(told(sums[i], layers[i], experts, tally.wanted));
  return out;
}

}  // namespace mantissa
