// Which ranks are reported as slow, and how often.
#include "train/stragglers.h"

#include <gmock/gmock.h>

namespace mantissa::stragglers_test {

using ::testing::IsEmpty;
using ::testing::SizeIs;

// All reports of so many windows in which every step takes these times.
std::vector<Straggler> windows(Stragglers& stragglers, int count, const std::vector<double>& seconds) {
  std::vector<Straggler> all;
  for (int step = 0; step < count * Stragglers::kWindowSteps; ++step) {
    for (const Straggler& straggler : stragglers.add(seconds)) all.push_back(straggler);
  }
  return all;
}

TEST(Stragglers, ARankThatIsSlowForTenWindowsIsReportedOnce) {
  Stragglers stragglers(4);
  const std::vector<double> seconds = {1, 1, 2, 1};
  EXPECT_THAT(windows(stragglers, 9, seconds), IsEmpty());
  for (int step = 1; step < Stragglers::kWindowSteps; ++step) EXPECT_THAT(stragglers.add(seconds), IsEmpty()) << "before the window ends";
  const std::vector<Straggler> reports = stragglers.add(seconds);
  ASSERT_THAT(reports, SizeIs(1));
  EXPECT_EQ(reports[0].rank, 2);
  EXPECT_EQ(reports[0].ratio, 0.5);
  EXPECT_THAT(windows(stragglers, 50, seconds), IsEmpty());
}

TEST(Stragglers, AHundredStepsMakeOne) {
  Stragglers stragglers(2);
  for (int step = 1; step < 100; ++step) EXPECT_THAT(stragglers.add(std::vector<double>{1, 2}), IsEmpty()) << step;
  EXPECT_THAT(stragglers.add(std::vector<double>{1, 2}), SizeIs(1));
}

TEST(Stragglers, OneThatRecoversIsReportedAgainWhenItIsSlowAgain) {
  Stragglers stragglers(3);
  const std::vector<double> slow = {3, 1, 1}, equal = {1, 1, 1};
  EXPECT_THAT(windows(stragglers, 10, slow), SizeIs(1));
  EXPECT_THAT(windows(stragglers, 1, equal), IsEmpty());
  EXPECT_THAT(windows(stragglers, 9, slow), IsEmpty());
  EXPECT_THAT(windows(stragglers, 1, slow), SizeIs(1));
}

TEST(Stragglers, TheTenWindowsFollowEachOther) {
  Stragglers stragglers(2);
  for (int i = 0; i < 5; ++i) {
    EXPECT_THAT(windows(stragglers, 9, {1, 3}), IsEmpty());
    EXPECT_THAT(windows(stragglers, 1, {1, 1}), IsEmpty());
  }
}

TEST(Stragglers, SevenTenthsOfTheMedianAreNotYetSlow) {
  Stragglers below(3), at(3);
  EXPECT_THAT(windows(below, 10, {0.699, 0.699, 1}), SizeIs(1));
  EXPECT_THAT(windows(at, 10, {0.7, 0.7, 1}), IsEmpty());
}

TEST(Stragglers, OneOfTwoCanBeOne) {
  Stragglers two(2);
  const std::vector<Straggler> reports = windows(two, 10, {4, 1});
  ASSERT_THAT(reports, SizeIs(1));
  EXPECT_EQ(reports[0].rank, 0);
  EXPECT_EQ(reports[0].ratio, 0.25);
}

TEST(Stragglers, HalfOfFourCanBeSome) {
  Stragglers four(4), most(4);
  EXPECT_THAT(windows(four, 10, {1, 3, 3, 1}), SizeIs(2));
  EXPECT_THAT(windows(most, 10, {1, 3, 3, 3}), IsEmpty()) << "one is fast, and the median is slow";
}

TEST(Stragglers, OneSlowStepIsNotAWindow) {
  Stragglers stragglers(2);
  std::vector<Straggler> reports;
  for (int window = 0; window < 30; ++window) {
    for (int step = 0; step < Stragglers::kWindowSteps; ++step) {
      const std::vector<double> seconds = {1, step == 0 ? 3.0 : 1.0};  // 12 of 10 seconds
      for (const Straggler& straggler : stragglers.add(seconds)) reports.push_back(straggler);
    }
  }
  EXPECT_THAT(reports, IsEmpty());
}

TEST(Stragglers, NoTimesAreNobodysFault) {
  Stragglers stragglers(2);
  EXPECT_THAT(windows(stragglers, 20, {0, 0}), IsEmpty());
}

}  // namespace mantissa::stragglers_test
