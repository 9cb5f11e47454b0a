// Intervals of paired differences: Student's quantiles against closed forms and published digits, and how often they cover the truth.
#include <gmock/gmock.h>

#include <cmath>
#include <numbers>
#include <random>
#include <tuple>

#include "testing.h"
#include "tools/compare/comparison.h"

namespace mantissa::paired_difference_test {

using tools::paired_difference;
using tools::PairedDifference;
using tools::student_probability;
using tools::student_quantile;

TEST(StudentQuantile, OfOneAndTwoDegreesIsTheClosedForm) {
  for (const double p : {0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.9999}) {
    EXPECT_NEAR(student_quantile(p, 1), std::tan(p * std::numbers::pi / 2), 1e-9 * (1 + student_quantile(p, 1))) << p;
    EXPECT_NEAR(student_quantile(p, 2), p * std::sqrt(2 / (1 - p * p)), 1e-9 * (1 + student_quantile(p, 2))) << p;
  }
}

// Abramowitz and Stegun, table 26.10, whose digits are rounded to three places.
TEST(StudentQuantile, HasTheDigitsOfTables) {
  for (const auto& [degrees, p, t] : {std::tuple(3, .95, 3.182),
                                      {4, .95, 2.776},
                                      {5, .95, 2.571},
                                      {9, .95, 2.262},
                                      {30, .95, 2.042},
                                      {120, .95, 1.980},
                                      {4, .99, 4.604},
                                      {7, .9, 1.895}})
    EXPECT_NEAR(student_quantile(p, degrees), t, 5e-4) << degrees << ", " << p;
  EXPECT_NEAR(student_quantile(.95, 1'000'000), 1.959966, 1e-5) << "the normal distribution";
}

TEST(StudentQuantile, IsTheInverseOfTheProbability) {
  for (const int64_t degrees : {1, 2, 3, 4, 5, 8, 17, 100})
    for (const double p : {0.05, 0.5, 0.8, 0.95, 0.999}) EXPECT_NEAR(student_probability(student_quantile(p, degrees), degrees), p, 1e-12);
}

// The density of Student's distribution, integrated by Simpson's rule.
TEST(StudentProbability, IsTheIntegralOfTheDensity) {
  for (const int64_t degrees : {1, 2, 3, 4, 7, 12}) {
    const auto n = static_cast<double>(degrees);
    const double scale = std::exp(std::lgamma((n + 1) / 2) - std::lgamma(n / 2)) / std::sqrt(n * std::numbers::pi);
    const auto density = [&](double t) { return scale * std::pow(1 + t * t / n, -(n + 1) / 2); };
    constexpr int kSteps = 2000;
    const double end = 2.5, h = end / kSteps;
    double sum = density(0) + density(end);
    for (int i = 1; i < kSteps; ++i) sum += (i % 2 == 1 ? 4 : 2) * density(i * h);
    EXPECT_NEAR(student_probability(end, degrees), 2 * sum * h / 3, 1e-9) << degrees;
  }
}

TEST(PairedDifference, IsThatOfAWorkedExample) {
  const PairedDifference found = paired_difference({1.5, 2.0, 4.0}, {1.0, 2.0, 3.0});  // differences .5, 0, 1
  EXPECT_EQ(found.pairs, 3);
  EXPECT_DOUBLE_EQ(found.mean, 0.5);
  EXPECT_NEAR(found.half_width.value(), 4.302652729911275 * 0.5 / std::sqrt(3.0), 1e-9);
  EXPECT_NEAR(paired_difference({1.5, 2.0, 4.0}, {1.0, 2.0, 3.0}, .5).half_width.value(), std::sqrt(2.0 / 3) * 0.5 / std::sqrt(3.0), 1e-9);
}

TEST(PairedDifference, OfOnePairHasNoInterval) {
  const PairedDifference found = paired_difference({1.5}, {1.0});
  EXPECT_DOUBLE_EQ(found.mean, 0.5);
  EXPECT_FALSE(found.half_width);
  EXPECT_EQ(paired_difference({1.0, 2.0}, {1.0, 2.0}).half_width, 0.0) << "equal runs";
}

TEST(PairedDifference, RefusesValuesWithoutAPartner) {
  EXPECT_THROW(paired_difference({1.0, 2.0}, {1.0}), Error);
  EXPECT_THROW(paired_difference({}, {}), Error);
}

// Pairs as runs have them: seeds move both by far more than the recipe does.
TEST(PairedDifference, CoversTheTruthAsOftenAsStated) {
  constexpr int kTrials = 10'000;
  constexpr double kTruth = 0.004, kOfSeed = 0.02, kOfRun = 0.003;
  for (const size_t pairs : {2U, 3U, 5U, 10U}) {
    std::mt19937_64 random(pairs);
    std::normal_distribution<double> normal;
    int covered = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      std::vector<double> values, baseline;
      for (size_t i = 0; i < pairs; ++i) {
        const double of_seed = 1.67 + kOfSeed * normal(random);
        baseline.push_back(of_seed + kOfRun * normal(random));
        values.push_back(of_seed + kTruth + kOfRun * normal(random));
      }
      const PairedDifference found = paired_difference(values, baseline);
      covered += std::abs(found.mean - kTruth) <= found.half_width.value() ? 1 : 0;
    }
    EXPECT_GE(covered, kTrials * 93 / 100) << pairs;
    EXPECT_LE(covered, kTrials * 97 / 100) << pairs;
  }
}

}  // namespace mantissa::paired_difference_test
