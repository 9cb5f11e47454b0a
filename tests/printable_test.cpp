#include "mantissa/base/printable.h"

#include <gtest/gtest.h>

namespace mantissa {
namespace {

TEST(Printable, EveryControlCharacterIsEscaped) {
  for (int c = 0; c < 0x100; ++c) {
    const std::string text(1, static_cast<char>(c));
    const bool plain = c >= 0x20 && c < 0x7f;
    EXPECT_EQ(printable(text) == text, plain) << c;
  }
  EXPECT_EQ(printable("a\x1b[2J\x7f\t"), "a\\x1b[2J\\x7f\\x09");
}

TEST(Printable, CharactersOfAnyLengthStayWhole) {
  const std::string text = "Zo\u00eb \u2500 \U0001f600";
  EXPECT_EQ(printable(text), text);
}

TEST(Printable, SecondSetOfControlCharactersAndBytesThatAreNoTextAreEscaped) {
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J"),
            "\\xc2\\x9b2J");
  EXPECT_EQ(printable("\xc2\xa0"), "\xc2\xa0");
  EXPECT_EQ(printable("\x9b\xff\xc3"), "\\x9b\\xff\\xc3");
  EXPECT_EQ(printable("\xe2\x94z"), "\\xe2\\x94z");
}

TEST(Printable, LineEndsBecomeWhatTheCallerWants) {
  EXPECT_EQ(printable("a\nb"), "a\\x0ab");
  EXPECT_EQ(printable("a\nb\n", "\n  "), "a\n  b\n  ");
}

}  // namespace
}  // namespace mantissa
