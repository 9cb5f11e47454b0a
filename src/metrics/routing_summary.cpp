#include "metrics/routing_summary.h"

#include <algorithm>
#include <numeric>

namespace mantissa {
namespace {

constexpr size_t kLosses = RouterStatistics::kLosses;

// Sums the figures of one layer.
struct Figures {
  std::vector<double> assignments;  // numbers of each expert, then those dropped: whole numbers
  std::vector<double> losses = {};  // losses of one micro batch after the other
};

LayerRouting reported(const Figures& figures, int64_t layer, size_t experts, RouterFigures wanted) {
  LayerRouting out{.layer = layer};
  double all = 0.0, most = 0.0;
  for (size_t e = 0; e < experts; ++e) {
    const double load = figures.assignments[e];
    out.load.push_back(static_cast<int64_t>(load));
    all += load;
    most = std::max(most, load);
  }
  out.imbalance = all > 0.0 ? most * static_cast<double>(experts) / all : 1.0;
  out.dropped = all > 0.0 ? figures.assignments.back() / all : 0.0;
  if (wanted == RouterFigures::counts) return out;
  const auto mean_loss = [&losses = figures.losses](size_t which) {
    double sum = 0.0;
    for (size_t i = which; i < losses.size(); i += kLosses) sum += losses[i];
    return sum / static_cast<double>(losses.size() / kLosses);
  };
  out.balance_loss = mean_loss(0);
  out.sequence_balance_loss = mean_loss(1);
  out.z_loss = mean_loss(2);
  return out;
}

}  // namespace

int64_t routing_numbers(const RunConfig& config) {
  const int64_t layers = config.model.expert_layers();
  return layers == 0 ? 0 : layers * (config.model.moe->num_experts + 1 + static_cast<int64_t>(kLosses) * *config.training.grad_accum);
}

std::vector<LayerRouting> routing_summary(std::span<const double> rows, RouterFigures wanted, const RunConfig& config,
                                          const Communicator& ranks) {
  const ModelConfig& model = config.model;
  if (!model.moe) return {};
  const MoeConfig& moe = *model.moe;
  const auto experts = static_cast<size_t>(moe.num_experts);
  std::vector<int64_t> layers;
  for (int64_t i = 0; i < model.num_layers; ++i) {
    if (model.has_experts(i)) layers.push_back(i);
  }
  std::vector<Figures> figures(layers.size(), Figures{.assignments = std::vector<double>(experts + 1)});
  for (size_t i = 0, width = experts + kLosses; i < rows.size() / width; ++i) {  // rows of RouterStatistics
    const std::span<const double> chosen = rows.subspan(i * width, experts), losses = rows.subspan(i * width + experts, kLosses);
    Figures& layer = figures[i % layers.size()];
    const double tokens = std::accumulate(chosen.begin(), chosen.end(), 0.0) / static_cast<double>(moe.num_experts_per_tok);
    const int64_t capacity = moe.capacity(static_cast<int64_t>(tokens));  // by the tokens that the micro batch had for experts
    for (size_t e = 0; e < experts; ++e) {
      layer.assignments[e] += chosen[e];
      if (capacity > 0) layer.assignments.back() += std::max(0.0, chosen[e] - static_cast<double>(capacity));
    }
    if (wanted == RouterFigures::counts_and_losses) layer.losses.insert(layer.losses.end(), losses.begin(), losses.end());
  }
  if (ranks.size() > 1) {
    // Sums over all ranks in one exchange. Micro batches keep the order of one process, so their sums have its bits; sums of assignments
    // are exact in any order.
    std::vector<double> sent, received;
    for (const Figures& layer : figures) {
      sent.insert(sent.end(), layer.assignments.begin(), layer.assignments.end());
      sent.insert(sent.end(), layer.losses.begin(), layer.losses.end());
    }
    for (int r = 0; r < ranks.size(); ++r) received.insert(received.end(), sent.begin(), sent.end());
    const std::vector<int64_t> counts(static_cast<size_t>(ranks.size()), static_cast<int64_t>(sent.size() * sizeof(double)));
    ranks.all_gather(std::as_writable_bytes(std::span(received)), counts, Purpose::control);
    const std::ptrdiff_t losses = std::ssize(figures[0].losses);
    for (Figures& layer : figures) layer = {.assignments = std::vector<double>(experts + 1)};
    for (auto next = received.cbegin(); next != received.cend();) {
      for (Figures& layer : figures) {
        for (double& sum : layer.assignments) sum += *next++;
        layer.losses.insert(layer.losses.end(), next, next + losses);
        next += losses;
      }
    }
  }
  std::vector<LayerRouting> out;
  for (size_t i = 0; i < layers.size(); ++i) out.push_back(reported(figures[i], layers[i], experts, wanted));
  return out;
}

}  // namespace mantissa
