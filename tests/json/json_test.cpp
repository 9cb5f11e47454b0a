// Strict JSON and the places of keys and values.
#include "mantissa/json/json.h"

#include <gmock/gmock.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "files.h"

namespace mantissa::json_test {

using test::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Counted from the start.
std::string line_and_column(std::string_view content, size_t offset) {
  const std::string_view before = content.substr(0, offset), last = before.substr(before.rfind('\n') + 1);
  const auto columns = last.size() - static_cast<size_t>(std::ranges::count_if(last, continues_character));
  return text(std::ranges::count(before, '\n') + 1, ':', columns + 1);
}

std::string first_problem(const std::string& content) {
  const LocatedJson parsed = parse_located_json(content);
  if (parsed.problems.empty()) return "";
  return line_and_column(content, parsed.problems.front().offset) + " " + parsed.problems.front().message;
}

TEST(LocatedJson, TellsThePlaceOfEveryKeyAndValue) {
  const std::string content = "// x\n{\"a\": 1,\n /* \" */ \"b\" : [true, {\"c\\\"/~\": -1.5e3}, null]\n}";
  const LocatedJson parsed = parse_located_json(content, 1000);
  ASSERT_TRUE(parsed.problems.empty());
  const TextLines lines(content);
  const auto place = [&](const JsonNode& node) {
    EXPECT_EQ(lines.at(node.key - 1000), line_and_column(content, node.key - 1000));
    return lines.at(node.key - 1000) + " " + lines.at(node.value - 1000);
  };
  const JsonNode& b = parsed.root.members().at("b");
  ASSERT_TRUE(b.is_list());
  ASSERT_EQ(b.entries().size(), 3u);
  EXPECT_EQ(place(parsed.root), "2:1 2:1");
  EXPECT_EQ(place(parsed.root.members().at("a")), "2:2 2:7");
  EXPECT_EQ(place(b), "3:10 3:16");
  EXPECT_EQ(place(b.entries()[0]), "3:17 3:17");
  EXPECT_EQ(place(b.entries()[1]), "3:23 3:23");
  EXPECT_EQ(place(b.entries()[1].members().at("c\"/~")), "3:24 3:33");
  EXPECT_EQ(place(b.entries()[2]), "3:42 3:42");
  EXPECT_EQ(json_scalar_at(content, b.entries()[0].value - 1000), true);
  EXPECT_EQ(json_scalar_at(content, b.entries()[1].members().at("c\"/~").value - 1000), -1.5e3);
}

// The parser ends a comment there, too: else all later values would be read from the wrong place.
TEST(LocatedJson, ACarriageReturnEndsAComment) {
  for (const std::string end : {"\r", "\r\n", "\n"}) {
    const std::string content = "{\"a\": 1, // 2" + end + "\"b\": 3, // \"c\": 4" + end + "\"d\": /* 5" + end + "*/ 6}";
    const LocatedJson parsed = parse_located_json(content);
    ASSERT_TRUE(parsed.problems.empty());
    for (const auto& [name, value] : {std::pair{"a", 1}, {"b", 3}, {"d", 6}})
      EXPECT_EQ(json_scalar_at(content, parsed.root.members().at(name).value), value) << name;
  }
}

TEST(LocatedJson, CountsColumnsInCharacters) {
  const std::string content = "{\"ü\": 1, \"x\": nope}";
  EXPECT_THAT(first_problem(content), StartsWith("1:15 "));
}

TEST(LocatedJson, NamesWhatIsNotJson) {
  EXPECT_EQ(first_problem("{\"a\": 1,\n}"), "2:1 comma after the last entry");
  EXPECT_EQ(first_problem("[1, 2, ]"), "1:8 comma after the last entry");
  EXPECT_EQ(first_problem(std::string("[1]\0 x", 6)), "1:4 a zero byte") << "no end of the text, as the parser takes it";
  EXPECT_EQ(first_problem("\xef\xbb\xbf{}"), "1:1 starts with a byte order mark; save the file as UTF-8 without one");
  EXPECT_EQ(first_problem("{\"a\": 1, \"b\": 2, \"a\": 3}"), "1:18 duplicate key \"a\"");
  EXPECT_EQ(first_problem("[18446744073709551616]"), "1:2 integer beyond 64 bits: 18446744073709551616");
  EXPECT_EQ(first_problem("[-9223372036854775809]"), "1:2 integer beyond 64 bits: -9223372036854775809");
  EXPECT_EQ(first_problem("[18446744073709551615, -9223372036854775808]"), "");
  EXPECT_THAT(first_problem("{\"a\": 1e400}"), StartsWith("1:7 number overflow"));
  EXPECT_THAT(first_problem("{\"a\": NaN}"), StartsWith("1:7 "));
  EXPECT_THAT(first_problem("{\"a\": -Infinity}"), StartsWith("1:7 "));
  EXPECT_THAT(first_problem("{} {}"), StartsWith("1:4 "));
  EXPECT_THAT(first_problem(""), StartsWith("1:1 "));
  EXPECT_THAT(first_problem("{\"a\": 1"), StartsWith("1:8 "));
  EXPECT_THAT(first_problem("{\"a\" 1}"), StartsWith("1:6 "));
  EXPECT_THAT(first_problem("{\"a\": 1 \"b\": 2}"), StartsWith("1:9 "));
  EXPECT_THAT(first_problem("{\"a\": \"\xff\"}"), StartsWith("1:7 "));
  EXPECT_THAT(first_problem("{\"a\": \"line\nbreak\"}"), StartsWith("1:7 "));
  EXPECT_THAT(first_problem("{\"a\": 01}"), HasSubstr("unexpected number"));
  EXPECT_THAT(first_problem("{\"a\": 1} /* open"), StartsWith("1:"));
}

TEST(LocatedJson, AcceptsThirtyTwoLevelsAndNoMore) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(first_problem(nested(32)), "");
  EXPECT_EQ(first_problem(nested(33)), "1:33 nested more than 32 levels deep");
  EXPECT_EQ(first_problem(std::string(1'000'000, '[')), "1:33 nested more than 32 levels deep");
}

TEST(LocatedJson, ReportsAllDuplicatesAndLargeIntegers) {
  EXPECT_EQ(parse_located_json("{\"a\": 1, \"a\": 2, \"b\": 99999999999999999999, \"a\": 3}").problems.size(), 3u);
}

TEST(LocatedJson, ListsFiftyProblemsAndCountsTheRest) {
  std::string content = "{\"a\": 0";
  for (int i = 0; i < 1000; ++i) content += ", \"a\": 0";
  const LocatedJson parsed = parse_located_json(content + "}");
  EXPECT_EQ(parsed.problems.size(), 50u);
  EXPECT_EQ(parsed.more_problems, 950u);
  EXPECT_EQ(parsed.problems.front().key, "a");
}

TEST(LocatedJson, NamesTheValueOfAProblem) {
  const auto key = [](const std::string& content) { return parse_located_json(content).problems.at(0).key; };
  EXPECT_EQ(key(R"({"a/~": [0, {"b": [1, 99999999999999999999]}]})"), "a/~.1.b.1");
  EXPECT_EQ(key(R"({"a": [0, {"b": 1, "c": {}, "b": 2}]})"), "a.1.b");
  EXPECT_EQ(key(R"({"a": [0, {"b": nope}]})"), "a.1");
  EXPECT_EQ(key("nope"), "");
  EXPECT_EQ(key("99999999999999999999"), "");
}

TEST(LocatedJson, QuotesAtMostSixtyCharacters) {
  const std::string umlauts = test::repeated("ü", 100), digits(100, '9');
  EXPECT_EQ(first_problem("[" + digits + "]"), "1:2 integer beyond 64 bits: " + digits.substr(0, 60) + "...");
  EXPECT_EQ(first_problem("{\"" + umlauts + "\": 1, \"" + umlauts + "\": 2}"), "1:109 duplicate key \"" + test::repeated("ü", 59) + "...");
  EXPECT_LT(first_problem("[\"" + umlauts + umlauts).size(), 250u);
  EXPECT_THAT(first_problem("[\"" + umlauts + umlauts),
              HasSubstr("missing closing quote; last read: '\"" + test::repeated("ü", 59) + "...'"));
  EXPECT_LT(first_problem("[" + digits + test::repeated(digits, 10) + "e99999]").size(), 150u);
}

TEST(TextLines, AgreesWithCountingFromTheStart) {
  std::string content;
  for (int i = 0; i < 3000; ++i) content += i % 7 == 0 ? "\n" : i % 3 == 0 ? "ü" : "x";
  const TextLines lines(content);
  for (size_t offset = 0; offset <= content.size(); ++offset) ASSERT_EQ(lines.at(offset), line_and_column(content, offset)) << offset;
  const std::string one_line = test::repeated("ü", 1000);
  EXPECT_EQ(TextLines(one_line).at(2000), "1:1001");
}

// The first pages of the text are forbidden after the lines were counted: a place near the end must not need them.
TEST(TextLines, ReadsOnlyWhatIsNearThePlace) {
  const size_t bytes = 1 << 20, forbidden = bytes / 2;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const std::string_view content(static_cast<char*>(std::memset(memory, 'x', bytes)), bytes);
  const TextLines lines(content);
  ASSERT_EQ(::mprotect(memory, forbidden, PROT_NONE), 0);
  EXPECT_EQ(lines.at(bytes - 1), "1:1048576");
  ASSERT_EQ(::munmap(memory, bytes), 0);
}

TEST(StrictJson, ALineIsNamedByItsSourceAlone) {
  EXPECT_EQ(parse_json_line("{\"a\": [1]}", "m.jsonl:7").at("a").at(0), 1);
  const Error error = error_of([] { parse_json_line("{\"a\": 1, \"a\": 2}", "m.jsonl:7"); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_STREQ(error.what(), "m.jsonl:7: duplicate key \"a\"");
}

TEST(StrictJson, RefusesCommentsAndNamesTheSource) {
  EXPECT_EQ(parse_strict_json("{\"a\": [1]}", "m.json").at("a").at(0), 1);
  const Error error = error_of([] { parse_strict_json("{\"a\": 1} // x", "m.json"); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), StartsWith("m.json:1:10: "));
  EXPECT_THAT(error_of([] { parse_strict_json("{\"a\": 1,\n \"a\": 2}", "m.json"); }).what(),
              StartsWith("m.json:2:2: duplicate key \"a\""));
}

TEST(StrictJson, EveryTruncationIsAnError) {
  const std::string whole = R"({"a": [1, -2.5, "x\"y", true, null], "b": {"c": {}}})";
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(error_of([&] { parse_strict_json(whole.substr(0, length), "m.json"); }).code(), ExitCode::data) << length;
  }
  parse_strict_json(whole, "m.json");
}

}  // namespace mantissa::json_test
