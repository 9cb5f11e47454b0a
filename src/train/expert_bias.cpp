#include "train/expert_bias.h"

#include <numeric>
#include <span>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

// choices: of one layer. Sums of whole numbers are exact, and so is what is compared.
void update(const Buffer& bias, float rate, std::span<const double> choices) {
  const double all = std::accumulate(choices.begin(), choices.end(), 0.0), experts = static_cast<double>(choices.size());
  std::vector<float> values = to_host<float>(bias.value);
  for (size_t e = 0; e < values.size(); ++e) {
    if (choices[e] * experts > all) values[e] -= rate;
    if (choices[e] * experts < all) values[e] += rate;
  }
  bias.value.device().upload(values.data(), bias.value);
}

}  // namespace

std::vector<double> expert_choices(const ParameterSet& parameters, const RoutingTally& tally) {
  std::vector<double> sums;
  const size_t layers = parameters.buffers().size();
  if (layers == 0) return sums;
  const auto experts = static_cast<size_t>(parameters.buffers().front().shape.elements());
  sums.resize(layers * experts);
  for (size_t i = 0; i < tally.records.size(); ++i) {
    const std::vector<int32_t> counts = to_host<int32_t>(tally.records[i].counts);
    const auto layer = std::span(sums).subspan(i % layers * experts, experts);
    for (size_t c = 0; c < counts.size(); ++c) layer[c % experts] += counts[c];
  }
  return sums;
}

void update_expert_biases(ParameterSet& parameters, double rate, const std::vector<double>& choices) {
  std::span<const double> rest = choices;
  for (const Buffer& bias : parameters.buffers()) {
    const auto experts = static_cast<size_t>(bias.shape.elements());
    update(bias, static_cast<float>(rate), rest.first(experts));
    rest = rest.subspan(experts);
  }
}

}  // namespace mantissa
