// Expressions of tokenizers: those that are taken, and what they match.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <random>

#include "files.h"
#include "mantissa/base/text.h"
#include "mantissa/base/version.h"
#include "text/characters.h"
#include "text/pattern_syntax.h"
#include "text/split_pattern.h"
#include "text/unicode_tables.inc"

namespace mantissa::text_pattern_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> matches(const SplitPattern& pattern, const std::string& text) {
  PatternMatcher matcher(pattern);
  matcher.search(text);
  std::vector<std::string> found;
  for (;;) {
    const PatternMatch match = matcher.next();
    if (match.kind == PatternMatch::Kind::none) return found;
    found.push_back(text.substr(match.begin, match.end - match.begin));
  }
}

std::vector<std::string> matches(const std::string& expression, const std::string& text) {
  return matches(SplitPattern::expression(expression), text);
}

constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

TEST(SplitPattern, CutsAsPublishedTokenizersDo) {
  EXPECT_THAT(matches(kLlama3, "I'Ll say 12345  no\r\n\n x!"),
              ElementsAre("I", "'Ll", " say", " ", "123", "45", " ", " no", "\r\n\n", " x", "!"));
}

// Words of single_word are those of Rust's regex, capitals those of the database.
TEST(UnicodeTables, CharactersHaveTheirProperties) {
  constexpr std::u32string_view kSpaces =
      U"\t\n\v\f\r \u0085\u00A0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200A\u2028\u2029\u202F\u205F\u3000";
  constexpr std::u32string_view kWord =
                                    U"aZ_7\u00AA\u0301\u0903\u20DD\u2160\u200C\u200D\u24B6\u24E9\U0001F130\U0001F149\U0001F150\U0001F189",
                                kNoWord = U" -\u00B2\u00BD\u2460\u24EA\U0001F12F\U0001F14A\U0001F18A",
                                kPunctuation = U"!/$+^`~\u00A1\u00A7\u00AB\u00BF\u166D\u2010\u2027\u3001\u3003\uFF01\U000111C9",
                                kNoPunctuation = U"a \u00A0\u00A2\u1B7F\u2028\u3000\u3004",
                                kNumeric = U"7\u00B2\u00BE\u0660\u2160\u2188\u2460", kNotNumeric = U"a\u00B1\u24B6\u218Ax";
  for (char32_t c = 0; c < kCodePoints; ++c) ASSERT_EQ(is_white_space(c), kSpaces.find(c) != std::u32string_view::npos) << uint32_t{c};
  for (const char32_t c : kWord) EXPECT_TRUE(is_word_character(c)) << uint32_t{c};
  for (const char32_t c : kNoWord) EXPECT_FALSE(is_word_character(c)) << uint32_t{c};
  for (const char32_t c : kPunctuation) EXPECT_TRUE(is_punctuation(c)) << uint32_t{c};
  for (const char32_t c : kNoPunctuation) EXPECT_FALSE(is_punctuation(c)) << uint32_t{c};
  for (const char32_t c : kNumeric) EXPECT_TRUE(is_numeric(c)) << uint32_t{c};
  for (const char32_t c : kNotNumeric) EXPECT_FALSE(is_numeric(c)) << uint32_t{c};
  for (const auto& [capital, small] : {std::pair<char32_t, char32_t>{U'A', U'a'}, {0x130, U'i'}, {0x10D50, 0x10D70}, {0x1E921, 0x1E943}}) {
    EXPECT_EQ(lower_case(capital), small) << uint32_t{capital};
    EXPECT_EQ(lower_case(small), small) << uint32_t{small};
  }
}

// PCRE2 counts U+180E as a space, Oniguruma does not.
TEST(SplitPattern, TakesForASpaceWhatUnicodeDoes) {
  EXPECT_THAT(matches(R"(\s+)", "a\u180Eb\u0085\u00A0\u3000c"), ElementsAre("\u0085\u00A0\u3000"));
  for (const char* const other : {R"([^\s]+)", R"(\S+)"}) EXPECT_THAT(matches(other, "a\u180Eb c"), ElementsAre("a\u180Eb", "c"));
}

TEST(SplitPattern, OneThatDependsOnWhatFollowsIsUndecided) {
  const SplitPattern pattern = SplitPattern::expression(R"(\s+(?!\S)|\s+|\p{L}+)");
  PatternMatcher matcher(pattern);
  const auto kinds = [&matcher](const char* text, bool goes_on) {
    matcher.search(text);
    std::vector<PatternMatch::Kind> out;
    do out.push_back(matcher.next(goes_on).kind);
    while (out.back() == PatternMatch::Kind::match);
    return out;
  };
  using enum PatternMatch::Kind;
  EXPECT_THAT(kinds("ab ", true), ElementsAre(match, undecided));
  EXPECT_THAT(kinds("ab", true), ElementsAre(undecided));
  EXPECT_THAT(kinds("12", true), ElementsAre(undecided));
  EXPECT_THAT(kinds("12", false), ElementsAre(none));
  EXPECT_THAT(kinds("ab  c", true), ElementsAre(match, match, match, undecided)) << "one of two spaces is certain, then the other";
}

// The table's version is 16: these characters are newer than the system's libraries, and one is missing from the table itself.
TEST(SplitPattern, CategoriesAreThoseOfTheTable) {
  const std::string letter = "\U00010D5A", digit = "\U00010D41", symbol = "\U0001FA77", mark = "\U00010D6A", unassigned = "\U0001F6D8";
  const std::string all = letter + digit + symbol + mark + unassigned;
  EXPECT_THAT(matches(R"(\p{L})", all), ElementsAre(letter));
  EXPECT_THAT(matches(R"(\p{Lu})", all), ElementsAre(letter));
  EXPECT_THAT(matches(R"(\d)", all), ElementsAre(digit));
  EXPECT_THAT(matches(R"(\p{N})", all), ElementsAre(digit));
  EXPECT_THAT(matches(R"([\p{P}\p{S}])", all), ElementsAre(symbol));
  EXPECT_THAT(matches(R"(\p{Mn})", all), ElementsAre(mark));
  EXPECT_THAT(matches(R"(\p{Cn})", all), ElementsAre(unassigned));
  EXPECT_THAT(matches(R"(\P{L}+)", all), ElementsAre(digit + symbol + mark + unassigned));
  EXPECT_THAT(matches(R"(\p{^L}+)", all), ElementsAre(digit + symbol + mark + unassigned));
  EXPECT_THAT(matches(R"([^\s\p{L}\p{N}]+)", all), ElementsAre(symbol + mark + unassigned));
  EXPECT_THAT(matches(R"(\w)", all + "_\u24B6"), ElementsAre(letter, digit, mark, "_", "\u24B6")) << "a circled letter is alphabetic";
  EXPECT_THAT(matches(R"(\w+)", "\u2160\u200d\u00b2\u00bd\u00b7\u2074"), ElementsAre("\u2160", "\u00b2\u00bd"));
  EXPECT_THAT(matches(R"([^\w]+)", all), ElementsAre(symbol, unassigned));
  EXPECT_THAT(matches(R"([\W\d]+)", all), ElementsAre(digit + symbol, unassigned));
  EXPECT_THAT(matches(R"(\w+)", "\u00b1\u00b2\u00b3\u00b4\u00b9\u00ba\u00bb\u00bc\u00bd\u00be\u00bf"),
              ElementsAre("\u00b2\u00b3", "\u00b9\u00ba", "\u00bc\u00bd\u00be"));
  EXPECT_THAT(matches(R"(\w+)", "-\u0301\u0903\u20dd-"), ElementsAre("\u0301\u0903\u20dd")) << "marks of all three kinds";
  for (const char* const letters : {R"(\D+)", R"(\P{^L}+)", R"(\p{^N}+)", R"(\P{N}+)"})
    EXPECT_THAT(matches(letters, "1ab2"), ElementsAre("ab")) << letters;
}

// `mantissa --version`, `doctor` and checkpoints show the version.
TEST(UnicodeTables, TheirVersionIsSaidByTheBuild) {
  const std::string said = text("Unicode ", kUnicodeVersion);
  EXPECT_THAT(build_fingerprint(), HasSubstr(said));
  EXPECT_THAT(version_text(), HasSubstr(text("Unicode   ", kUnicodeVersion)));
}

TEST(SplitPattern, ACodePointHasOneCategory) {
  std::string all;
  for (char32_t c = 0; c < kCodePoints; ++c)
    if (is_unicode_scalar(c)) append_utf8(c, all);
  size_t bytes = 0;
  for (const char* const group : {"L", "M", "N", "P", "S", "Z", "C"}) {
    const std::vector<std::string> found = matches(std::string("\\p{") + group + "}+", all),
                                   rest = matches(std::string("\\P{") + group + "}+", all);
    size_t of_group = 0, of_rest = 0;
    for (const std::string& run : found) of_group += run.size();
    for (const std::string& run : rest) of_rest += run.size();
    EXPECT_EQ(of_group + of_rest, all.size()) << group;
    EXPECT_GT(found.size(), 5U) << group;
    bytes += of_group;
  }
  EXPECT_EQ(bytes, all.size());
}

TEST(SplitPattern, ClassesAreRangesAndSets) {
  EXPECT_THAT(matches(R"([a-c\x{78}-\u007a-]+)", "abd-xz"), ElementsAre("ab", "-xz"));
  EXPECT_THAT(matches("[\u4e00-\u9fa5\u3040-\u309f]+", "a\u4e2d\u3042b"), ElementsAre("\u4e2d\u3042"));
  EXPECT_THAT(matches(R"([+--]+)", "*+,-."), ElementsAre("+,-"));
  EXPECT_THAT(matches(R"([a-]+|[\s-]+)", "ab- -"), ElementsAre("a", "-", " -")) << "a hyphen at the end is one";
  EXPECT_THAT(matches(R"([^\S\n]+)", "a \t\n b"), ElementsAre(" \t", " ")) << "white space but line ends";
  EXPECT_THAT(matches(R"(a[^\s\S]|b)", "a b"), ElementsAre("b")) << "a class that nothing is in";
  EXPECT_THAT(matches(R"([\s\S]b)", "b\nb"), ElementsAre("\nb"));
  EXPECT_THAT(matches("a.", "a\na\u00e9a\ra\u2028"), ElementsAre("a\u00e9", "a\r", "a\u2028")) << "all but a line end";
  EXPECT_THAT(matches(R"([\t\f]+)", "\v\f\t\v"), ElementsAre("\f\t"));
  EXPECT_THAT(matches(R"(\x{10FFFF}|\x{00007a})", "\U0010FFFEz\U0010FFFF"), ElementsAre("z", "\U0010FFFF"));
  EXPECT_THAT(matches("ax|bx|cx|[ab]+|[bc]+|[ac]+", "abbcca"), ElementsAre("abb", "cc", "a")) << "of kinds that follow each other, and not";
  EXPECT_THAT(matches("\u00e9+", "e\u00e9\u00e9"), ElementsAre("\u00e9\u00e9"));
}

// U+017F folds to "s", U+212A to "k".
TEST(SplitPattern, LettersOfAnyCaseAreThoseThatFoldToThem) {
  EXPECT_THAT(matches("(?i:'s|k)x", "'Sx'\u017fxKx\u212axsx"), ElementsAre("'Sx", "'\u017fx", "Kx", "\u212ax"));
  EXPECT_THAT(matches("(?i:[a-k])+", "aK\u212al"), ElementsAre("aK\u212a"));
  EXPECT_THAT(matches("(?i:[^s])", "Ssa\u017fS"), ElementsAre("a"));
  EXPECT_THAT(matches("(?i:(?:a)b)|c", "AbC"), ElementsAre("Ab"));
  EXPECT_THAT(matches("(?i:f|s|sx|s+)", "SsXF"), ElementsAre("S", "s", "F")) << "two letters of different branches are no pair";
}

TEST(SplitPattern, TellsNoMoreThan256KindsOfCharactersApart) {
  std::string letters, as_class = "[";
  for (char32_t c = 0x4E00; c < 0x4E00 + 255; ++c) append_utf8(c, letters), append_utf8(c, as_class);
  EXPECT_THAT(matches(letters, "x" + letters), ElementsAre(letters));
  append_utf8(0x3042, letters);
  const Error error = test::error_of([&] { SplitPattern::expression(letters); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("256"));
  EXPECT_EQ(test::error_of([&] { SplitPattern::literal(letters); }).code(), ExitCode::data);
  EXPECT_EQ(matches(as_class + "]+", letters).size(), 1U) << "whose letters are one kind";
}

// Membership in every set decides the class, and nothing else.
TEST(CharacterClasses, TellApartWhatTheSetsDo) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    std::vector<CodePoints> sets(1 + random() % 5);
    std::vector<char32_t> points = {0, 0xFF, 0x100, kCodePoints - 1};
    for (CodePoints& set : sets) {
      CodePoints ranges;
      for (size_t i = 0; i < 1 + random() % 4; ++i) {
        const auto first = static_cast<char32_t>(random() % (round % 2 == 0 ? 600 : kCodePoints));
        const char32_t last = std::min<char32_t>(first + static_cast<char32_t>(random() % 300), kCodePoints - 1);
        ranges.push_back({first, last});
        for (const auto near : {first - 1U, first + 0U, last + 0U, last + 1U}) points.push_back(std::min<char32_t>(near, kCodePoints - 1));
      }
      set = random() % 4 == 0 ? others(united(ranges)) : united(ranges);
    }
    const std::optional<CharacterClasses> classes = CharacterClasses::dividing(sets);
    ASSERT_TRUE(classes.has_value());
    const auto membership = [&](char32_t c) {
      std::vector<bool> out;
      for (const CodePoints& set : sets)
        out.push_back(std::ranges::any_of(set, [c](auto range) { return c >= range.first && c <= range.last; }));
      return out;
    };
    for (const char32_t a : points) {
      for (const char32_t b : points)
        EXPECT_EQ(classes->class_of(a) == classes->class_of(b), membership(a) == membership(b)) << uint32_t{a} << ' ' << uint32_t{b};
      for (size_t i = 0; i < sets.size(); ++i)
        EXPECT_EQ(std::ranges::count(classes->classes_of(sets[i]), classes->class_of(a)), membership(a)[i] ? 1 : 0)
            << uint32_t{a} << " in " << i;
    }
  }
}

// Two bytes that stand for a set of 6 KB: without a limit, and with a set for each, a file of 1 MB took gigabytes.
TEST(SplitPattern, ExpressionsAreShortAndTheirSetsShared) {
  std::string words;
  for (int i = 0; i < 500000; ++i) words += R"(\w)";
  for (const auto& refused :
       {std::function([&] { SplitPattern::expression(words); }), std::function([&] { SplitPattern::literal(words); })}) {
    const Error error = test::error_of(refused);
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), HasSubstr("more than 16384 bytes"));
    EXPECT_LT(std::string(error.what()).size(), 1000U);
  }
  EXPECT_THAT(matches(SplitPattern::literal(std::string(16384, 'a')), std::string(16385, 'a')), ElementsAre(std::string(16384, 'a')));
  const PatternParts parts = pattern_parts(R"(\w+a\W[\w]\w|a)");
  EXPECT_EQ(parts.sets().size(), 3U) << "\\w, a, \\W";
  EXPECT_EQ(std::ranges::count_if(parts.parts(), [](const PatternPart& part) { return part.set >= 0; }), 6);
}

struct Refused {
  const char *expression, *construct;
};

TEST(RefusedPatterns, AreNamedByTheConstruct) {
  static const Refused kRows[] = {{R"(\bx)", R"(\b)"},
                                  {R"(\h)", R"(\h)"},
                                  {R"([\h])", R"(\h)"},
                                  {R"([a-\d])", R"(a-\d)"},
                                  {R"([z-a])", "z-a"},
                                  {R"(\p{})", R"(\p{})"},
                                  {R"((?i:\x{73}))", R"(\x{73})"},
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
                                  {R"((?i:é))", "é"},
                                  {R"((?i:\p{Lu}))", R"(\p{Lu})"},
                                  {R"([\s-z])", "-"},
                                  {R"(\xe9)", R"(\xe9)"},
                                  {R"(\x{D800})", R"(\x{D800})"},
                                  {R"(\x{110000})", R"(\x{110000})"},
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
  EXPECT_THAT(matches(SplitPattern::literal("a.b(\xE2\x96\x81"), "axb( a.b(\xE2\x96\x81"), ElementsAre("a.b(\xE2\x96\x81"));
  EXPECT_THAT(matches(SplitPattern::literal("ab"), "aAB"), IsEmpty());
  const SplitPattern pattern = SplitPattern::expression("(?:a+)+b|c");
  PatternMatcher matcher(pattern);
  const std::string text(4000, 'a');
  matcher.search(text);
  const Error error = test::error_of([&] { matcher.next(); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("(?:a+)+b|c"));
  EXPECT_EQ(test::error_of([] { SplitPattern::expression("a\xFF"); }).code(), ExitCode::data);
}

}  // namespace mantissa::text_pattern_test
