// The ranks that are reported as slow, and the number of reports.
#include <gmock/gmock.h>

#include "train/replicas.h"

namespace mantissa::stragglers_test {

using Seconds = std::vector<double>;

// All reports of so many steps that take these times.
std::vector<Straggler> steps(Stragglers& stragglers, int count, const Seconds& seconds) {
  std::vector<Straggler> all;
  for (int step = 0; step < count; ++step) {
    for (const Straggler& straggler : stragglers.add(seconds)) all.push_back(straggler);
  }
  return all;
}

constexpr int kWindow = Stragglers::kWindowSteps;

struct Course {
  const char* what;
  struct Stretch {
    int steps;
    Seconds seconds;
    size_t reports;
  };
  std::vector<Stretch> parts;
};

TEST(Stragglers, AreReportedOnceForTenWindowsThatFollowEachOther) {
  const Seconds slow = {3, 1, 1}, equal = {1, 1, 1};
  const Course courses[] = {
      {"ten windows, not before the last one ends, and once", {{10 * kWindow - 1, slow, 0}, {1, slow, 1}, {50 * kWindow, slow, 0}}},
      {"a hundred steps make ten windows", {{99, {1, 2}, 0}, {1, {1, 2}, 1}}},
      {"who recovers is reported again", {{100, slow, 1}, {kWindow, equal, 0}, {9 * kWindow, slow, 0}, {kWindow, slow, 1}}},
      {"windows are counted anew", {{90, slow, 0}, {kWindow, equal, 0}, {90, slow, 0}, {kWindow, equal, 0}, {90, slow, 0}}},
      {"below seven tenths of the median", {{100, {0.699, 0.699, 1}, 1}}},
      {"at seven tenths", {{100, {0.7, 0.7, 1}, 0}}},
      {"half of four", {{100, {1, 3, 3, 1}, 2}}},
      {"one is fast, and the median is slow", {{100, {1, 3, 3, 3}, 0}}},
      {"no times", {{200, {0, 0}, 0}}},
  };
  for (const Course& course : courses) {
    Stragglers stragglers(static_cast<int>(course.parts[0].seconds.size()));
    for (const auto& part : course.parts) EXPECT_EQ(steps(stragglers, part.steps, part.seconds).size(), part.reports) << course.what;
  }
}

TEST(Stragglers, AreNamedWithTheirPartOfTheSpeed) {
  for (const auto& [seconds, rank, ratio] : {std::tuple(Seconds{1, 1, 2, 1}, 2, 0.5), std::tuple(Seconds{4, 1}, 0, 0.25)}) {
    Stragglers stragglers(static_cast<int>(seconds.size()));
    const std::vector<Straggler> reports = steps(stragglers, 10 * kWindow, seconds);
    ASSERT_EQ(reports.size(), 1U);
    EXPECT_EQ(reports[0].rank, rank);
    EXPECT_EQ(reports[0].ratio, ratio);
  }
}

TEST(Stragglers, OneSlowStepIsNotAWindow) {
  Stragglers stragglers(2);
  for (int window = 0; window < 30; ++window) {
    EXPECT_TRUE(steps(stragglers, 1, {1, 3}).empty());  // 12 of 10 seconds
    EXPECT_TRUE(steps(stragglers, kWindow - 1, {1, 1}).empty());
  }
}

}  // namespace mantissa::stragglers_test
