#include "train/expert_bias.h"

#include <numeric>
#include <span>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

// Returns what is added to the biases of one layer. Sums of whole numbers are exact, and so are the comparisons.
std::vector<float> changes(float rate, std::span<const double> assignments) {
  const double all = std::accumulate(assignments.begin(), assignments.end(), 0.0), experts = static_cast<double>(assignments.size());
  std::vector<float> out;
  for (const double each : assignments) out.push_back(each * experts > all ? -rate : each * experts < all ? rate : 0.0F);
  return out;
}

}  // namespace

std::vector<double> expert_assignments(const ParameterSet& parameters, std::span<const double> figures) {
  std::vector<double> sums;
  const size_t layers = parameters.buffers().size();
  if (layers == 0) return sums;
  const auto experts = static_cast<size_t>(parameters.buffers().front().shape.elements()), width = experts + RouterStatistics::kLosses;
  sums.resize(layers * experts);
  for (size_t i = 0; i < figures.size() / width; ++i) {
    for (size_t e = 0; e < experts; ++e) sums[i % layers * experts + e] += figures[i * width + e];
  }
  return sums;
}

// The host knows what changes but not the biases, and need not wait for them.
void update_expert_biases(ParameterSet& parameters, double rate, const std::vector<double>& assignments) {
  std::span<const double> rest = assignments;
  for (const Buffer& bias : parameters.buffers()) {
    const auto experts = static_cast<size_t>(bias.shape.elements());
    const std::vector<float> change = changes(static_cast<float>(rate), rest.first(experts));
    Backend& device = bias.value.device();
    device.run(Add{.a = bias.value, .b = from_host(device, Dtype::f32, bias.shape, change.data()), .out = bias.value});
    rest = rest.subspan(experts);
  }
}

}  // namespace mantissa
