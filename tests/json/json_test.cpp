// Strict JSON and the places of keys and values.
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "files.h"
#include "json_values.h"
#include "mantissa/json/json_fields.h"

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
  const ParsedJson parsed = parse_commented_json(content);
  if (parsed.problems.empty()) return "";
  return line_and_column(content, parsed.problems.front().offset) + " " + parsed.problems.front().message;
}

TEST(CommentedJson, TellsThePlaceOfEveryKeyAndValue) {
  const std::string content = "// x\n{\"a\": 1,\n /* \" */ \"b\" : [true, {\"c\\\"/~\": -1.5e3}, null]\n}";
  const ParsedJson parsed = parse_commented_json(content, 1000);
  ASSERT_TRUE(parsed.problems.empty());
  const TextLines lines(content);
  const auto place = [&](const Json& node) {
    EXPECT_EQ(lines.at(node.key - 1000), line_and_column(content, node.key - 1000));
    return lines.at(node.key - 1000) + " " + lines.at(node.place - 1000);
  };
  const Json& b = parsed.root.members().at("b");
  ASSERT_TRUE(b.is_list());
  ASSERT_EQ(b.entries().size(), 3u);
  EXPECT_EQ(place(parsed.root), "2:1 2:1");
  EXPECT_EQ(place(parsed.root.members().at("a")), "2:2 2:7");
  EXPECT_EQ(place(b), "3:10 3:16");
  EXPECT_EQ(place(b.entries()[0]), "3:17 3:17");
  EXPECT_EQ(place(b.entries()[1]), "3:23 3:23");
  EXPECT_EQ(place(b.entries()[1].members().at("c\"/~")), "3:24 3:33");
  EXPECT_EQ(place(b.entries()[2]), "3:42 3:42");
  EXPECT_EQ(parsed.root, (Json{{"a", 1}, {"b", {true, {{"c\"/~", -1.5e3}}, nullptr}}}));
}

// The parser ends a comment there, too: else all later values would be read from the wrong place.
TEST(CommentedJson, ACarriageReturnEndsAComment) {
  for (const std::string end : {"\r", "\r\n", "\n"}) {
    const std::string content = "{\"a\": 1, // 2" + end + "\"b\": 3, // \"c\": 4" + end + "\"d\": /* 5" + end + "*/ 6}";
    const ParsedJson parsed = parse_commented_json(content);
    ASSERT_TRUE(parsed.problems.empty());
    for (const auto& [name, value] : {std::pair{"a", '1'}, {"b", '3'}, {"d", '6'}})
      EXPECT_EQ(content[parsed.root.at(name).place], value) << name;
  }
}

TEST(CommentedJson, CountsColumnsInCharacters) {
  const std::string content = "{\"ü\": 1, \"x\": nope}";
  EXPECT_THAT(first_problem(content), StartsWith("1:15 "));
}

TEST(CommentedJson, NamesWhatIsNotJson) {
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

TEST(StrictJson, TakesIntegersBeyond64BitsForDoubles) {
  const Json value = parse_json(R"({"model_max_length": 1000000000000000019884624838656, "id": 18446744073709551615})", "f");
  EXPECT_FALSE(value.get("model_max_length").is_integer());
  EXPECT_EQ(value.get("model_max_length").number(), 1e30);
  EXPECT_TRUE(value.get("id").is_integer());
}

TEST(CommentedJson, AcceptsThirtyTwoLevelsAndNoMore) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(first_problem(nested(32)), "");
  EXPECT_EQ(first_problem(nested(33)), "1:33 nested more than 32 levels deep");
  EXPECT_EQ(first_problem(std::string(1'000'000, '[')), "1:33 nested more than 32 levels deep");
}

TEST(CommentedJson, ReportsAllDuplicatesAndLargeIntegers) {
  EXPECT_EQ(parse_commented_json("{\"a\": 1, \"a\": 2, \"b\": 99999999999999999999, \"a\": 3}").problems.size(), 3u);
}

TEST(CommentedJson, ListsFiftyProblemsAndCountsTheRest) {
  std::string content = "{\"a\": 0";
  for (int i = 0; i < 1000; ++i) content += ", \"a\": 0";
  const ParsedJson parsed = parse_commented_json(content + "}");
  EXPECT_EQ(parsed.problems.size(), 50u);
  EXPECT_EQ(parsed.more_problems, 950u);
  EXPECT_EQ(parsed.problems.front().key, "a");
}

TEST(CommentedJson, NamesTheValueOfAProblem) {
  const auto key = [](const std::string& content) { return parse_commented_json(content).problems.at(0).key; };
  EXPECT_EQ(key(R"({"a/~": [0, {"b": [1, 99999999999999999999]}]})"), "a/~.1.b.1");
  EXPECT_EQ(key(R"({"a": [0, {"b": 1, "c": {}, "b": 2}]})"), "a.1.b");
  EXPECT_EQ(key(R"({"a": [0, {"b": nope}]})"), "a.1");
  EXPECT_EQ(key("nope"), "");
  EXPECT_EQ(key("99999999999999999999"), "");
}

TEST(CommentedJson, QuotesAtMostSixtyCharacters) {
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

TEST(StrictJson, AnInvalidTextIsNullWhereNobodyIsTold) {
  EXPECT_EQ(parse_json_or_null("{\"a\": 1}").get("a"), 1);
  for (const char* const invalid : {"{\"a\": 1", "{\"a\": 1} x", "{\"a\": 1, \"a\": 2}", ""})
    EXPECT_TRUE(parse_json_or_null(invalid).is_null()) << invalid;
}

TEST(StrictJson, ALineIsNamedByItsSourceAlone) {
  EXPECT_EQ(parse_json_line("{\"a\": [1]}", "m.jsonl:7").at("a").at(0), 1);
  const Error error = error_of([] { parse_json_line("{\"a\": 1, \"a\": 2}", "m.jsonl:7"); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_STREQ(error.what(), "m.jsonl:7: duplicate key \"a\"");
}

TEST(StrictJson, RefusesCommentsAndNamesTheSource) {
  EXPECT_EQ(parse_json("{\"a\": [1]}", "m.json").at("a").at(0), 1);
  const Error error = error_of([] { parse_json("{\"a\": 1} // x", "m.json"); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), StartsWith("m.json:1:10: "));
  EXPECT_THAT(error_of([] { parse_json("{\"a\": 1,\n \"a\": 2}", "m.json"); }).what(), StartsWith("m.json:2:2: duplicate key \"a\""));
}

TEST(StrictJson, EveryTruncationIsAnError) {
  const std::string whole = R"({"a": [1, -2.5, "x\"y", true, null], "b": {"c": {}}})";
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_EQ(error_of([&] { parse_json(whole.substr(0, length), "m.json"); }).code(), ExitCode::data) << length;
  }
  parse_json(whole, "m.json");
}

Json parsed(const std::string& content) { return parse_json(content, "t.json"); }

TEST(JsonValue, KnowsItsKind) {
  const std::vector<std::pair<std::string, std::string>> kinds = {
      {"null", "null"},        {"true", "boolean"}, {"7", "number"},    {"-0", "number"}, {"18446744073709551615", "number"},
      {"1.0", "number"},       {"\"a\"", "string"}, {"\"\"", "string"}, {"[]", "array"},  {"[0]", "array"},
      {"{\"a\":0}", "object"}, {"{}", "object"}};
  for (const auto& [content, kind] : kinds) EXPECT_EQ(parsed(content).type_name(), kind) << content;
  EXPECT_TRUE(parsed("18446744073709551615").is_integer());
  EXPECT_FALSE(parsed("1.0").is_integer());
  EXPECT_TRUE(parsed("1.0").is_number());
  EXPECT_EQ(from_json<int64_t>("-9223372036854775808", "t.json"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(from_json<uint64_t>("18446744073709551615", "t.json"), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(error_of([] { from_json<int64_t>("18446744073709551615", "t.json"); }).code(), ExitCode::data);
  EXPECT_EQ(error_of([] { from_json<int64_t>("1.0", "t.json"); }).code(), ExitCode::data);
}

TEST(JsonValue, WritesCompactlyOrALineForEachEntry) {
  const std::string compact = R"({"a":[1,-2.5,1e+300,"x\"é\u0001"],"b":{},"c":[],"d":{"e":null,"f":true}})";
  EXPECT_EQ(parsed(compact).dump(), compact);
  EXPECT_EQ(parsed(R"({"b": {"c": []}, "a": [1, {}]})").dump(1), "{\n \"a\": [\n  1,\n  {}\n ],\n \"b\": {\n  \"c\": []\n }\n}");
  Json made = {{"b", 1}, {"a", {{"d", 2}, {"c", "\xff"}}}};
  made.add("aa", made.at("b"));
  made.add("b", 3);
  EXPECT_EQ(made.dump(), "{\"a\":{\"c\":\"\xef\xbf\xbd\",\"d\":2},\"aa\":1,\"b\":3}");
  EXPECT_EQ(made.dump(-1, Json::Order::keys), "{\"b\":3,\"a\":{\"d\":2,\"c\":\"\xef\xbf\xbd\"},\"aa\":1}");
  EXPECT_EQ(parse_json("{\"b\": 1, \"a\": 2}", "x").dump(-1, Json::Order::keys), "{\"b\":1,\"a\":2}");
  EXPECT_EQ((Json{0.1, std::nan(""), HUGE_VAL}).dump(), "[0.1,null,null]");
}

TEST(JsonValue, BracesOfPairsAreAnObjectAndOthersAList) {
  const Json value = {{"a", {1, 2}}, {"b", {{"c", "d"}}}, {"e", std::optional<double>()}, {"f", std::vector<std::string>{"g", "h"}}};
  EXPECT_EQ(value.dump(), R"({"a":[1,2],"b":{"c":"d"},"e":null,"f":["g","h"]})");
}

TEST(JsonValue, NumbersAreEqualByValueAndPlacesDoNotMatter) {
  EXPECT_EQ(parsed("[1, 2.0]"), parsed("[1.0,2]"));
  EXPECT_NE(parsed("18446744073709551615"), parsed("18446744073709551614"));
  EXPECT_NE(parsed("9223372036854775807"), parsed("9223372036854775806"));
  EXPECT_NE(parsed("1"), parsed("true"));
  EXPECT_NE(parsed("\"\""), parsed("[]"));
  EXPECT_NE(parsed("null"), parsed("{}"));
}

TEST(JsonValue, CopiesShareNothing) {
  const Json value = parsed(R"({"a": [1, {"b": "c"}]})");
  Json copy = value;
  copy["a"][1]["b"] = 2;
  EXPECT_EQ(value.dump(), R"({"a":[1,{"b":"c"}]})");
  EXPECT_EQ(copy.dump(), R"({"a":[1,{"b":2}]})");
}

TEST(JsonValue, MembersOfWhatIsNoObjectAreRefusedAndAbsentOnesToo) {
  Json number = 5;
  EXPECT_EQ(error_of([&] { number["a"] = 1; }).code(), ExitCode::internal);
  EXPECT_EQ(error_of([&] { number.at("a"); }).code(), ExitCode::internal);
  EXPECT_FALSE(number.contains("a"));
  EXPECT_EQ(parsed("{\"a\": 1}").find("b"), nullptr);
}

TEST(JsonValue, ListsItsLeavesByPath) {
  const Json value = parsed(R"({"a": [{"b": 1}, []], "c": {"d": {}, "e": "f"}})");
  std::string all;
  for (const auto& [path, leaf] : leaves_of(value)) all += path + "=" + leaf->dump() + " ";
  EXPECT_EQ(all, "a.0.b=1 a.1=[] c.d={} c.e=\"f\" ");
  EXPECT_EQ(leaves_of(Json()).at("")->dump(), "null");
}

}  // namespace mantissa::json_test
