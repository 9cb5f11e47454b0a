#include "models/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

constexpr double kTurn = 2.0 * std::numbers::pi;

// Rotations are computed in fp32, in the order of operations of transformers, which servers share: 16,384 positions on, another rounding of
// a frequency is another angle by a thousandth. Where torch and C++ leave the last bit of a power to a library it is rounded from fp64.
float power(double base, float exponent) { return static_cast<float>(std::pow(static_cast<double>(static_cast<float>(base)), exponent)); }

// Frequencies that turn more than high_freq_factor times within the original sequence stay, those that turn fewer than low_freq_factor
// times are divided by factor, and between them the share of the former rises with the number of turns.
float llama3_frequency(float frequency, const RopeScalingConfig& scaling) {
  const auto length = static_cast<double>(scaling.original_max_position_embeddings);
  const double low = scaling.low_freq_factor.value_or(1.0), high = scaling.high_freq_factor.value_or(4.0);
  const auto factor = static_cast<float>(scaling.factor);
  const float turn = 1.0F / frequency * static_cast<float>(kTurn);  // in positions
  if (turn > static_cast<float>(length / low)) return frequency / factor;
  if (turn < static_cast<float>(length / high)) return frequency;
  const float turns = 1.0F / turn * static_cast<float>(length);
  const float kept = (turns - static_cast<float>(low)) / static_cast<float>(high - low);
  return (1.0F - kept) * frequency / factor + kept * frequency;
}

// Returns the first and the last pair that blend from frequencies as they are to those divided by factor.
std::pair<double, double> yarn_ramp(double head_dim, double theta, const RopeScalingConfig& scaling) {
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

}  // namespace

RopeFrequencies rope_frequencies(int64_t head_dim, double theta, const std::optional<RopeScalingConfig>& scaling) {
  RopeFrequencies out;  // wavelengths at first
  for (int64_t i = 0; i < head_dim / 2; ++i) out.of_pairs.push_back(power(theta, static_cast<float>(2 * i) / static_cast<float>(head_dim)));
  if (scaling && scaling->type == RopeScaling::yarn) {
    const auto [first, last] = yarn_ramp(static_cast<double>(head_dim), theta, *scaling);
    for (size_t i = 0; i < out.of_pairs.size(); ++i) {
      const float place = (static_cast<float>(i) - static_cast<float>(first)) / static_cast<float>(last - first);
      const float kept = 1.0F - std::clamp(place, 0.0F, 1.0F), wavelength = out.of_pairs[i];
      out.of_pairs[i] = 1.0F / (static_cast<float>(scaling->factor) * wavelength) * (1.0F - kept) + 1.0F / wavelength * kept;
    }
    const auto magnitude = [&](double times) { return 0.1 * times * std::log(scaling->factor) + 1.0; };
    const double scale = scaling->attention_factor ? *scaling->attention_factor
                         : scaling->mscale         ? magnitude(*scaling->mscale) / magnitude(scaling->mscale_all_dim.value())
                                                   : magnitude(1.0);
    out.scale = static_cast<float>(scale);
    return out;
  }
  for (float& frequency : out.of_pairs) {
    frequency = 1.0F / frequency;
    if (scaling) frequency = llama3_frequency(frequency, *scaling);
  }
  return out;
}

Tensor make_rope_table(Backend& device, int64_t positions, const RopeFrequencies& frequencies) {
  const size_t half = frequencies.of_pairs.size();
  std::vector<float> table(static_cast<size_t>(positions) * 2 * half);
  for (int64_t p = 0; p < positions; ++p) {
    float* const row = table.data() + static_cast<size_t>(p) * 2 * half;
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<float>(p) * frequencies.of_pairs[i];
      row[i] = static_cast<float>(std::cos(angle)) * frequencies.scale;
      row[half + i] = static_cast<float>(std::sin(angle)) * frequencies.scale;
    }
  }
  return from_host(device, Dtype::f32, {positions, static_cast<int64_t>(2 * half)}, table.data());
}

}  // namespace mantissa
