// Texts, hashes and counts of base.
#include "mantissa/base/text.h"

#include <gmock/gmock.h>

#include <limits>

#include "base/hash.h"
#include "mantissa/base/integers.h"

namespace mantissa::text_test {

using ::testing::ElementsAre;

TEST(Joined, PutsTheSeparatorBetweenWhatIsShownOfEach) {
  EXPECT_EQ(joined(std::vector<int>{}), "");
  EXPECT_EQ(joined(std::vector<int>{7}), "7");
  EXPECT_EQ(joined(std::vector<const char*>{"a", "", "c"}), "a, , c");
  const auto shown = [](const std::string& name) { return name + "!"; };
  EXPECT_EQ(joined(std::vector<std::string>{"a", "b"}, "\n  ", shown), "a!\n  b!");
  EXPECT_EQ(joined(std::vector<std::pair<int, double>>{{1, 0.5}, {2, 1e-9}}, " ", &std::pair<int, double>::second), "0.5 1e-09");
}

TEST(Split, GivesOnePartMoreThanThereAreSeparators) {
  EXPECT_THAT(split("layers.0.mlp", '.'), ElementsAre("layers", "0", "mlp"));
  EXPECT_THAT(split("", '.'), ElementsAre(""));
  EXPECT_THAT(split("..a", '.'), ElementsAre("", "", "a"));
  EXPECT_THAT(split("a.", '.'), ElementsAre("a", ""));
  EXPECT_EQ(joined(split(".a..b.", '.'), "."), ".a..b.");
}

TEST(CountText, HasAPluralForAllButOne) {
  EXPECT_EQ(count_text(0, "thread"), "0 threads");
  EXPECT_EQ(count_text(int64_t{1}, "thread"), "1 thread");
  EXPECT_EQ(count_text(size_t{2}, "thread"), "2 threads");
}

TEST(Shortened, CutsBehindWholeCharacters) {
  EXPECT_EQ(shortened("añb", 3), "añb");
  EXPECT_EQ(shortened("añb", 2), "añ...");
  EXPECT_EQ(shortened("añb", 1), "a...");
  EXPECT_EQ(shortened("", 0), "");
  EXPECT_EQ(shortened(std::string(1000, '\x80'), 10), std::string(40, '\x80') + "...");  // no UTF-8 at all
}

TEST(Hash, Xxh64HasThePublishedValues) {
  EXPECT_EQ(xxh64("").text(), "ef46db3751d8e999");
  EXPECT_EQ(xxh64("abc").text(), "44bc2cf5ad770999");
  EXPECT_EQ(text(xxh64("abc")), "44bc2cf5ad770999");
  EXPECT_EQ(Hash64::parse("44bc2cf5ad770999"), Hash64{0x44bc2cf5ad770999u});
  for (const char* wrong : {"44BC2CF5AD770999", "44bc2cf5ad77099", "44bc2cf5ad7709990", "44bc2cf5ad77099g", " 4bc2cf5ad770999", ""})
    EXPECT_EQ(Hash64::parse(wrong), std::nullopt) << wrong;
}

TEST(Hash, OfAStreamIsThatOfItsPartsTogetherAndTheNextOneStartsAnew) {
  StreamHash stream;
  EXPECT_EQ(stream.finish(), xxh64(""));
  for (const std::string part : {"a", "", "bc"}) stream.update(std::as_bytes(std::span(part)));
  EXPECT_EQ(stream.finish(), xxh64("abc"));
  EXPECT_EQ(stream.finish(), xxh64(""));
}

TEST(BytesText, IsInTheLargestUnitOfWhichThereIsOne) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(1024), "1.0 KiB");
  EXPECT_EQ(bytes_text((int64_t{1} << 20) - 1), "1024.0 KiB");
  EXPECT_EQ(bytes_text(int64_t{3} << 19), "1.5 MiB");
  EXPECT_EQ(bytes_text(int64_t{9} << 29), "4.5 GiB");
  EXPECT_EQ(bytes_text(int64_t{1} << 40), "1.0 TiB");
  EXPECT_EQ(bytes_text(int64_t{1000} << 50), "1000.0 PiB");
  EXPECT_EQ(bytes_text(std::numeric_limits<int64_t>::max()), "8.0 EiB");
}

TEST(Integers, AreDividedAndRoundedUpWithoutOverflow) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (int64_t n = 0; n < 20; ++n) {
    EXPECT_EQ(ceil_div(n, 8), n == 0 ? 0 : (n - 1) / 8 + 1) << n;
    EXPECT_EQ(round_up(n, 8), 8 * ceil_div(n, 8)) << n;
  }
  EXPECT_EQ(ceil_div(kMost, 2), kMost / 2 + 1);
  EXPECT_EQ(ceil_div(int64_t{-1}, 8), 0);
  EXPECT_EQ(round_up(size_t{17}, 4), 20U);
}

}  // namespace mantissa::text_test
