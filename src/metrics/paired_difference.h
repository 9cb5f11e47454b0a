// Statistics of paired runs: a recipe and the baseline train from the same seeds, so what a seed does to both cancels in their difference.
//
// With differences d_1 .. d_n, their mean m and s^2 = sum (d_i - m)^2 / (n - 1), the interval is m +- t s / sqrt(n), where t is the
// quantile of Student's distribution with n - 1 degrees of freedom (Student 1908, "The probable error of a mean"). It covers the mean of
// all seeds with the stated probability if differences are normally distributed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace mantissa {

constexpr double kConfidence = 0.95;

// Returns P(|T| <= t), t >= 0, of Student's distribution with so many degrees of freedom, at least 1. Source: the finite sums of Abramowitz
// and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
double student_probability(double t, int64_t degrees);

// Returns the t >= 0 of which P(|T| <= t) is `probability`, in [0, 1).
double student_quantile(double probability, int64_t degrees);

struct PairedDifference {
  int64_t pairs = 0;
  double mean = 0.0;
  std::optional<double> half_width = {};  // half of the interval around the mean; none: a single pair tells nothing about other seeds
};

// Takes as many values as the baseline has, at least one, in the order of the same seeds.
PairedDifference paired_difference(const std::vector<double>& values, const std::vector<double>& baseline, double confidence = kConfidence);

}  // namespace mantissa
