#include <gtest/gtest.h>

#include "mantissa/base/text.h"

namespace mantissa::printable_test {

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

TEST(Printable, WhatIsTooLongLosesItsMiddle) {
  EXPECT_EQ(without_middle("layers.0.mlp", 12), "layers.0.mlp");
  EXPECT_EQ(without_middle("layers.0.mlp", 11), "laye....mlp");
  EXPECT_EQ(without_middle("layers.0.mlp", 8), "lay...lp");
  EXPECT_EQ(without_middle("layers.0.mlp", 7), "la...lp");
  EXPECT_EQ(without_middle("layers.0.mlp", 4), "l...");
  EXPECT_EQ(without_middle("layers.0.mlp", 3), "...");
  EXPECT_EQ(without_middle("layers.0.mlp", 0), "");
  const std::string text = "\u65e5\u65e5\u65e5\u65e5";
  for (size_t most = 7; most < text.size(); ++most) {
    const std::string cut = without_middle(text, most);
    EXPECT_LE(cut.size(), most);
    EXPECT_EQ(printable(cut), cut);
    EXPECT_EQ(cut.find("..."), most < 8 ? 0u : 3u);
  }
}

TEST(Printable, LongLinesFoldAtSpacesAndElseAnywhere) {
  EXPECT_EQ(folded("", 8), "\n");
  EXPECT_EQ(folded("12345678", 8), "12345678\n");
  EXPECT_EQ(folded("12345678 9", 8), "12345678\n  9\n");
  EXPECT_EQ(folded("123 567 9", 8), "123 567\n  9\n");
  EXPECT_EQ(folded("123 5678 0123 56", 8), "123 5678\n  0123\n  56\n");
  EXPECT_EQ(folded("ab 12 B c", 8), "ab 12 B\n  c\n");
  EXPECT_EQ(folded("abc 123 B c", 8), "abc\n  123 B\n  c\n");
  EXPECT_EQ(folded("1234567890123456", 8), "12345678\n  901234\n  56\n");
  EXPECT_EQ(folded(" 234567890", 8), " 2345678\n  90\n");
  EXPECT_EQ(folded("1234567\u65e5z", 8), "1234567\n  \u65e5z\n");
  EXPECT_EQ(folded("\u65e5\u65e5\u65e5", 8), "\u65e5\u65e5\n  \u65e5\n");
}

}  // namespace mantissa::printable_test
