// Expressions of tokenizers: which are taken, and what they match.
#include <gmock/gmock.h>

#include "files.h"
#include "mantissa/text/split_pattern.h"
#include "text/pattern_syntax.h"

namespace mantissa::text_pattern_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> matches(const std::string& expression, const std::string& text) {
  const SplitPattern pattern = SplitPattern::expression(expression);
  const PatternMatcher matcher(pattern);
  std::vector<std::string> found;
  for (size_t at = 0; at < text.size();) {
    const PatternMatch match = matcher.find(text, at, false);
    if (match.kind == PatternMatch::Kind::none) break;
    found.push_back(text.substr(match.begin, match.end - match.begin));
    at = match.end;
  }
  return found;
}

constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

TEST(SplitPattern, CutsAsPublishedTokenizersDo) {
  EXPECT_THAT(matches(kLlama3, "I'Ll say 12345  no\r\n\n x!"),
              ElementsAre("I", "'Ll", " say", " ", "123", "45", " ", " no", "\r\n\n", " x", "!"));
}

// PCRE2 counts U+180E as a space, Oniguruma does not.
TEST(SplitPattern, TakesForASpaceWhatUnicodeDoes) {
  EXPECT_THAT(matches(R"(\s+)",
                      "a\xE1\xA0\x8E"
                      "b\xC2\x85\xC2\xA0\xE3\x80\x80"
                      "c"),
              ElementsAre("\xC2\x85\xC2\xA0\xE3\x80\x80"));
  EXPECT_THAT(matches(R"([^\s]+)",
                      "a\xE1\xA0\x8E"
                      "b c"),
              ElementsAre("a\xE1\xA0\x8E"
                          "b",
                          "c"));
  EXPECT_THAT(matches(R"(\S+)",
                      "a\xE1\xA0\x8E"
                      "b c"),
              ElementsAre("a\xE1\xA0\x8E"
                          "b",
                          "c"));
}

TEST(SplitPattern, OneThatDependsOnWhatFollowsIsUndecided) {
  const SplitPattern pattern = SplitPattern::expression(R"(\s+(?!\S)|\s+|\p{L}+)");
  const PatternMatcher matcher(pattern);
  EXPECT_EQ(matcher.find("ab ", 0, true).kind, PatternMatch::Kind::match);
  EXPECT_EQ(matcher.find("ab", 0, true).kind, PatternMatch::Kind::undecided);
  EXPECT_EQ(matcher.find("ab  ", 2, true).kind, PatternMatch::Kind::undecided);
  EXPECT_EQ(matcher.find("ab  c", 2, true).end, 3U);
  EXPECT_EQ(matcher.find("12", 0, true).kind, PatternMatch::Kind::undecided);
  EXPECT_EQ(matcher.find("12", 0, false).kind, PatternMatch::Kind::none);
}

struct Refused {
  const char *expression, *construct;
};

class RefusedPatterns : public ::testing::TestWithParam<Refused> {};

TEST_P(RefusedPatterns, AreNamedByTheConstruct) {
  const Error error = test::error_of([&] { SplitPattern::expression(GetParam().expression); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr(std::string("\"") + GetParam().construct + "\""));
}

INSTANTIATE_TEST_SUITE_P(, RefusedPatterns,
                         ::testing::Values(Refused{R"(a\w+)", R"(\w)"}, Refused{R"(\bx)", R"(\b)"}, Refused{R"(\h)", R"(\h)"},
                                           Refused{R"([\S])", R"(\S)"}, Refused{R"(^a)", "^"}, Refused{R"(a$)", "$"},
                                           Refused{R"((?<n>a))", "(?<"}, Refused{R"((?i)a)", "(?i"}, Refused{R"((a)\1)", R"(\1)"},
                                           Refused{R"([a[b]])", "["}, Refused{R"([a&&b])", "&"}, Refused{R"(a{,3})", "{,3"},
                                           Refused{R"(a{2}?)", "{2}"}, Refused{R"(a**)", "*"}, Refused{R"(a+++)", "++"},
                                           Refused{R"(\p{Greek}+)", R"(\p{Greek})"}, Refused{R"((?i:ss))", "s"},
                                           Refused{R"((?i:é))", "\\xc3"}, Refused{R"((?i:\p{Lu}))", R"(\p{Lu})"}, Refused{R"([\s-z])", "-"},
                                           Refused{R"(\xe9)", R"(\xe9)"}, Refused{R"(\x{D800})", R"(\x{D800})"}, Refused{R"((a)", ""},
                                           Refused{R"(a))", ")"}, Refused{R"([a)", "[a"}, Refused{R"(a*)", "a*"},
                                           Refused{R"((?<=a+)b)", "(?<=a+)b"}, Refused{R"(+a)", "+"}, Refused{R"(\)", R"(\)"},
                                           Refused{R"(\p{L)", R"(\p{)"}));

TEST(SplitPattern, EndlessBacktrackingIsAnError) {
  const SplitPattern pattern = SplitPattern::expression("(?:a+)+b|c");
  const PatternMatcher matcher(pattern);
  const Error error = test::error_of([&] { matcher.find(std::string(4000, 'a'), 0, false); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("(?:a+)+b|c"));
}

TEST(SplitPattern, ALiteralIsNoExpression) {
  const SplitPattern pattern = SplitPattern::literal("a.b(\xE2\x96\x81");
  const PatternMatcher matcher(pattern);
  EXPECT_EQ(matcher.find("axb( a.b(\xE2\x96\x81", 0, false).begin, 5U);
}

}  // namespace mantissa::text_pattern_test
