// Messages of a failed comparison of long data.
#include <gmock/gmock.h>

#include "testing.h"

namespace mantissa::test::same_elements_test {

TEST(SameElements, NameTheFirstDifferenceTheirNumberAndTwoLengths) {
  const std::vector<double> one(1000, 0.5), nan = {std::nan("")};
  std::vector<double> other = one;
  EXPECT_TRUE(same_elements(one, other));
  other[17] = 0.5 + 0x1p-53, other[900] = 2;
  EXPECT_STREQ(same_elements(other, one).message(), "2 of 1000 differ, first [17]: 0.50000000000000011, expected 0.5");
  EXPECT_STREQ(same_elements(std::string("a\x80z"), std::string("a\x7fz")).message(), "1 of 3 differ, first [1]: 0x80, expected 0x7f");
  EXPECT_STREQ(same_elements(std::string("abc"), std::string("ab")).message(), "3 elements, expected 2; the first 2 are equal");
  EXPECT_STREQ(same_elements(std::vector<int>{7, 8}, std::vector<int>{5}).message(),
               "2 elements, expected 1; 1 of 1 differ, first [0]: 7, expected 5");
  EXPECT_FALSE(same_elements(nan, nan)) << "no NaN is another";
}

}  // namespace mantissa::test::same_elements_test
