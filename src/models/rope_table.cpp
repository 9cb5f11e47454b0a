#include "models/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

constexpr double kTurn = 2.0 * std::numbers::pi;

// Frequencies that turn more than high_freq_factor times within the original sequence stay, those that turn fewer than low_freq_factor
// times are divided by factor, and between them the share of the former rises with the number of turns.
double llama3_frequency(double frequency, const RopeScalingConfig& scaling) {
  const double turns = static_cast<double>(scaling.original_max_position_embeddings) * frequency / kTurn;
  const double low = scaling.low_freq_factor.value_or(1.0), high = scaling.high_freq_factor.value_or(4.0);
  const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
  return frequency * (kept + (1.0 - kept) / scaling.factor);
}

// Pairs from `first` to `last` blend from frequencies as they are to those divided by factor.
struct YarnRamp {
  double first, last;
  double divided(int64_t pair) const { return std::clamp((static_cast<double>(pair) - first) / (last - first), 0.0, 1.0); }
};

YarnRamp yarn_ramp(double head_dim, double theta, const RopeScalingConfig& scaling) {
  const auto pair_that_turns = [&](double times) {
    const double length = static_cast<double>(scaling.original_max_position_embeddings);
    return head_dim * std::log(length / (times * kTurn)) / (2.0 * std::log(theta));
  };
  double first = pair_that_turns(scaling.beta_fast.value_or(32.0)), last = pair_that_turns(scaling.beta_slow.value_or(1.0));
  if (scaling.truncate.value_or(true)) first = std::floor(first), last = std::ceil(last);
  first = std::max(first, 0.0);
  last = std::min(last, head_dim - 1.0);
  return {first, first == last ? last + 0.001 : last};
}

double yarn_scale(const RopeScalingConfig& scaling) {
  const auto magnitude = [&](double times) { return 0.1 * times * std::log(scaling.factor) + 1.0; };
  if (scaling.attention_factor) return *scaling.attention_factor;
  return scaling.mscale ? magnitude(*scaling.mscale) / magnitude(scaling.mscale_all_dim.value()) : magnitude(1.0);
}

}  // namespace

RopeFrequencies rope_frequencies(int64_t head_dim, double theta, const std::optional<RopeScalingConfig>& scaling) {
  RopeFrequencies out;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    out.of_pairs.push_back(std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
  }
  if (!scaling) return out;
  if (scaling->type == RopeScaling::llama3) {
    for (double& frequency : out.of_pairs) frequency = llama3_frequency(frequency, *scaling);
    return out;
  }
  const YarnRamp ramp = yarn_ramp(static_cast<double>(head_dim), theta, *scaling);
  for (size_t i = 0; i < out.of_pairs.size(); ++i) {
    const double divided = ramp.divided(static_cast<int64_t>(i));
    out.of_pairs[i] *= divided / scaling->factor + (1.0 - divided);
  }
  out.scale = yarn_scale(*scaling);
  return out;
}

Tensor make_rope_table(Backend& device, int64_t positions, const RopeFrequencies& frequencies) {
  const size_t half = frequencies.of_pairs.size();
  std::vector<float> table(static_cast<size_t>(positions) * 2 * half);
  for (int64_t p = 0; p < positions; ++p) {
    float* const row = table.data() + static_cast<size_t>(p) * 2 * half;
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) * frequencies.of_pairs[i];
      row[i] = static_cast<float>(std::cos(angle) * frequencies.scale);
      row[half + i] = static_cast<float>(std::sin(angle) * frequencies.scale);
    }
  }
  return from_host(device, Dtype::f32, {positions, static_cast<int64_t>(2 * half)}, table.data());
}

}  // namespace mantissa
