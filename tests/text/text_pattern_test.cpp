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
  EXPECT_THAT(matches(R"(\s+)", "a\u180Eb\u0085\u00A0\u3000c"), ElementsAre("\u0085\u00A0\u3000"));
  for (const char* const other : {R"([^\s]+)", R"(\S+)"}) EXPECT_THAT(matches(other, "a\u180Eb c"), ElementsAre("a\u180Eb", "c"));
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

TEST(RefusedPatterns, AreNamedByTheConstruct) {
  static const Refused kRows[] = {{R"(a\w+)", R"(\w)"},
                                  {R"(\bx)", R"(\b)"},
                                  {R"(\h)", R"(\h)"},
                                  {R"([\S])", R"(\S)"},
                                  {R"(^a)", "^"},
                                  {R"(a$)", "$"},
                                  {R"((?<n>a))", "(?<"},
                                  {R"((?i)a)", "(?i"},
                                  {R"((a)\1)", R"(\1)"},
                                  {R"([a[b]])", "["},
                                  {R"([a&&b])", "&"},
                                  {R"(a{,3})", "{,3"},
                                  {R"(a{2}?)", "{2}"},
                                  {R"(a**)", "*"},
                                  {R"(a+++)", "++"},
                                  {R"(\p{Greek}+)", R"(\p{Greek})"},
                                  {R"((?i:ss))", "s"},
                                  {R"((?i:é))", "\\xc3"},
                                  {R"((?i:\p{Lu}))", R"(\p{Lu})"},
                                  {R"([\s-z])", "-"},
                                  {R"(\xe9)", R"(\xe9)"},
                                  {R"(\x{D800})", R"(\x{D800})"},
                                  {R"((a)", ""},
                                  {R"(a))", ")"},
                                  {R"([a)", "[a"},
                                  {R"(a*)", "a*"},
                                  {R"((?<=a+)b)", "(?<=a+)b"},
                                  {R"(+a)", "+"},
                                  {R"(\)", R"(\)"},
                                  {R"(\p{L)", R"(\p{)"}};
  for (const Refused& row : kRows) {
    const Error error = test::error_of([&] { SplitPattern::expression(row.expression); });
    EXPECT_EQ(error.code(), ExitCode::data) << row.expression;
    EXPECT_THAT(error.what(), HasSubstr(std::string("\"") + row.construct + "\"")) << row.expression;
  }
}

TEST(SplitPattern, ALiteralIsNoExpressionAndEndlessBacktrackingAnError) {
  const SplitPattern literal = SplitPattern::literal("a.b(\xE2\x96\x81");
  EXPECT_EQ(PatternMatcher(literal).find("axb( a.b(\xE2\x96\x81", 0, false).begin, 5U);
  const SplitPattern pattern = SplitPattern::expression("(?:a+)+b|c");
  const PatternMatcher matcher(pattern);
  const Error error = test::error_of([&] { matcher.find(std::string(4000, 'a'), 0, false); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("(?:a+)+b|c"));
}

}  // namespace mantissa::text_pattern_test
