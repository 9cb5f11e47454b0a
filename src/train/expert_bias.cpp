#include "train/expert_bias.h"

#include <numeric>
#include <span>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

// Updates one layer. Sums of whole numbers are exact, and so are the comparisons.
void update(const Buffer& bias, float rate, std::span<const double> assignments) {
  const double all = std::accumulate(assignments.begin(), assignments.end(), 0.0), experts = static_cast<double>(assignments.size());
  std::vector<float> values = to_host<float>(bias.value);
  for (size_t e = 0; e < values.size(); ++e) {
    if (assignments[e] * experts > all) values[e] -= rate;
    if (assignments[e] * experts < all) values[e] += rate;
  }
  bias.value.device().upload(values.data(), bias.value);
}

}  // namespace

std::vector<double> expert_assignments(const ParameterSet& parameters, const RouterStatistics& statistics) {
  std::vector<double> sums;
  const size_t layers = parameters.buffers().size();
  if (layers == 0) return sums;
  const auto experts = static_cast<size_t>(parameters.buffers().front().shape.elements());
  sums.resize(layers * experts);
  for (size_t i = 0; i < statistics.passes.size(); ++i) {
    const std::vector<int32_t> counts = to_host<int32_t>(statistics.passes[i].counts);
    const auto layer = std::span(sums).subspan(i % layers * experts, experts);
    for (size_t c = 0; c < counts.size(); ++c) layer[c % experts] += counts[c];
  }
  return sums;
}

void update_expert_biases(ParameterSet& parameters, double rate, const std::vector<double>& assignments) {
  std::span<const double> rest = assignments;
  for (const Buffer& bias : parameters.buffers()) {
    const auto experts = static_cast<size_t>(bias.shape.elements());
    update(bias, static_cast<float>(rate), rest.first(experts));
    rest = rest.subspan(experts);
  }
}

}  // namespace mantissa
