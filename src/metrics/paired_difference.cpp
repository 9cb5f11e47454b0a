#include "metrics/paired_difference.h"

#include <cmath>
#include <numbers>
#include <numeric>

#include "mantissa/base/error.h"

namespace mantissa {
namespace {

// P(|T| <= t) by the angle whose tangent is t / sqrt(degrees).
double probability_of(double angle, int64_t degrees) {
  const double cosine = std::cos(angle), sine = std::sin(angle);
  const bool odd = degrees % 2 == 1;
  double sum = 0.0, term = odd ? cosine : 1.0;
  for (int64_t power = odd ? 1 : 0; power <= degrees - 2; power += 2) {
    sum += term;
    term *= cosine * cosine * static_cast<double>(power + 1) / static_cast<double>(power + 2);
  }
  return odd ? (angle + sine * sum) * 2 * std::numbers::inv_pi : sine * sum;
}

}  // namespace

double student_probability(double t, int64_t degrees) {
  require(t >= 0.0 && degrees >= 1, "student_probability: t is ", t, " with ", degrees, " degrees of freedom");
  return probability_of(std::atan(t / std::sqrt(static_cast<double>(degrees))), degrees);
}

double student_quantile(double probability, int64_t degrees) {
  require(probability >= 0.0 && probability < 1.0 && degrees >= 1, "student_quantile: a probability of ", probability, " with ", degrees,
          " degrees of freedom");
  double low = 0.0, high = std::numbers::pi / 2;  // angles, of which the probability is a growing function
  for (int halving = 0; halving < 64; ++halving) {
    const double middle = low + (high - low) / 2;
    (probability_of(middle, degrees) < probability ? low : high) = middle;
  }
  return std::tan(low) * std::sqrt(static_cast<double>(degrees));
}

PairedDifference paired_difference(const std::vector<double>& values, const std::vector<double>& baseline, double confidence) {
  require(!values.empty() && values.size() == baseline.size(), "paired_difference: ", values.size(), " values and ", baseline.size());
  const auto count = static_cast<double>(values.size());
  std::vector<double> differences;
  for (size_t i = 0; i < values.size(); ++i) differences.push_back(values[i] - baseline[i]);
  PairedDifference out{.pairs = std::ssize(values), .mean = std::accumulate(differences.begin(), differences.end(), 0.0) / count};
  if (out.pairs == 1) return out;
  double squares = 0.0;
  for (const double difference : differences) squares += (difference - out.mean) * (difference - out.mean);
  out.half_width = student_quantile(confidence, out.pairs - 1) * std::sqrt(squares / (count - 1) / count);
  return out;
}

}  // namespace mantissa
