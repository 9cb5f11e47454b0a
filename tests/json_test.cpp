// Strict JSON and the places of keys and values.
#include "mantissa/base/json.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "files.h"

namespace mantissa {
namespace {

using test::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string first_problem(const std::string& content) {
  const LocatedJson parsed = parse_located_json(content);
  if (parsed.problems.empty()) return "";
  return line_and_column(content, parsed.problems.front().offset) + " " + parsed.problems.front().message;
}

TEST(LocatedJson, TellsThePlaceOfEveryKeyAndValue) {
  const std::string content = "// x\n{\"a\": 1,\n /* \" */ \"b\" : [true, {\"c\\\"/~\": -1.5e3}, null]\n}";
  const LocatedJson parsed = parse_located_json(content);
  ASSERT_TRUE(parsed.problems.empty());
  const auto places = [&](const std::string& pointer) {
    const JsonPlace at = parsed.places.at(pointer);
    return line_and_column(content, at.key) + " " + line_and_column(content, at.value);
  };
  EXPECT_EQ(places(""), "2:1 2:1");
  EXPECT_EQ(places("/a"), "2:2 2:7");
  EXPECT_EQ(places("/b"), "3:10 3:16");
  EXPECT_EQ(places("/b/0"), "3:17 3:17");
  EXPECT_EQ(places("/b/1"), "3:23 3:23");
  EXPECT_EQ(places("/b/1/c\"~1~0"), "3:24 3:33");
  EXPECT_EQ(places("/b/2"), "3:42 3:42");
  EXPECT_EQ(parsed.places.size(), 7u);
}

TEST(LocatedJson, CountsColumnsInCharacters) {
  const std::string content = "{\"ü\": 1, \"x\": nope}";
  EXPECT_THAT(first_problem(content), StartsWith("1:15 "));
}

TEST(LocatedJson, NamesWhatIsNotJson) {
  EXPECT_EQ(first_problem("{\"a\": 1,\n}"), "2:1 comma after the last entry");
  EXPECT_EQ(first_problem("[1, 2, ]"), "1:8 comma after the last entry");
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

}  // namespace
}  // namespace mantissa
