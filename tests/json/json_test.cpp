// Strict JSON and the places of keys and values.
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "error_messages.h"
#include "json/json_fields.h"
#include "json_values.h"

namespace mantissa::json_test {

using test::error_of;
using ::testing::StartsWith;

// Line and column, counted from the start.
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

TEST(JsonMessages, AreTheExpectedOnes) {
  test::expect_messages("json", [](const std::string& input) {
    const ParsedJson parsed = parse_commented_json(input);
    return first_problem(input) + (parsed.problems.empty() ? "" : " " + parsed.problems.front().key);
  });
}

// No file of messages can hold these texts.
TEST(CommentedJson, NamesWhatIsNotTextOfJson) {
  EXPECT_EQ(first_problem(std::string("[1]\0 x", 6)), "1:4 a zero byte") << "no end of the text, as the parser takes it";
  EXPECT_EQ(first_problem("\xef\xbb\xbf{}"), "1:1 starts with a byte order mark; save the file as UTF-8 without one");
  EXPECT_THAT(first_problem("{\"a\": \"\xff\"}"), StartsWith("1:7 "));
  EXPECT_THAT(first_problem(""), StartsWith("1:1 "));
  EXPECT_EQ(first_problem(std::string(1'000'000, '[')), "1:33 nested more than 32 levels deep");
}

TEST(StrictJson, TakesIntegersBeyond64BitsForDoubles) {
  const Json value = parse_json(R"({"model_max_length": 1000000000000000019884624838656, "id": 18446744073709551615})", "f");
  EXPECT_FALSE(value.get("model_max_length").is_integer());
  EXPECT_EQ(value.get("model_max_length").number(), 1e30);
  EXPECT_TRUE(value.get("id").is_integer());
}

TEST(CommentedJson, ListsFiftyProblemsAndCountsTheRest) {
  EXPECT_EQ(parse_commented_json("{\"a\": 1, \"a\": 2, \"b\": 99999999999999999999, \"a\": 3}").problems.size(), 3u);
  std::string content = "{\"a\": 0";
  for (int i = 0; i < 1000; ++i) content += ", \"a\": 0";
  const ParsedJson parsed = parse_commented_json(content + "}");
  EXPECT_EQ(parsed.problems.size(), 50u);
  EXPECT_EQ(parsed.more_problems, 950u);
  EXPECT_EQ(parsed.problems.front().key, "a");
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

TEST(StrictJson, AnInvalidTextIsAnErrorWithItsSourceOrNullWhereNobodyIsTold) {
  const std::string whole = R"({"a": [1, -2.5, "x\"y", true, null], "b": {"c": {}}})";
  EXPECT_EQ(parse_json(whole, "m.json"), parse_json_line(whole, "m.jsonl:7"));
  EXPECT_EQ(parse_json_or_null(whole).get("a").at(0), 1);
  const auto problem = [](const auto& parse, const std::string& content, const char* name) {
    EXPECT_TRUE(parse_json_or_null(content).is_null()) << content;
    const Error error = error_of([&] { parse(content, name); });
    EXPECT_EQ(error.code(), ExitCode::data) << content;
    return std::string(error.what());
  };
  const auto file = [](const std::string& content, const char* name) { parse_json(content, name); };
  const auto line = [](const std::string& content, const char* name) { parse_json_line(content, name); };
  for (size_t length = 0; length < whole.size(); ++length) problem(file, whole.substr(0, length), "m.json");
  EXPECT_THAT(problem(file, "{\"a\": 1} // x", "m.json"), StartsWith("m.json:1:10: ")) << "comments are refused";
  EXPECT_EQ(problem(line, "{\"a\": 1, \"a\": 2}", "m.jsonl:7"), "m.jsonl:7: duplicate key \"a\"");
}

Json parsed(const std::string& content) { return parse_json(content, "t.json"); }

TEST(JsonValue, KnowsItsKind) {
  for (const auto& [kind, contents] :
       std::map<std::string, std::vector<std::string>>{{"null", {"null"}},
                                                       {"boolean", {"true"}},
                                                       {"number", {"7", "-0", "18446744073709551615", "1.0"}},
                                                       {"string", {"\"a\"", "\"\""}},
                                                       {"array", {"[]", "[0]"}},
                                                       {"object", {"{}", "{\"a\":0}"}}}) {
    for (const std::string& content : contents) EXPECT_EQ(parsed(content).type_name(), kind) << content;
  }
  EXPECT_EQ(from_json<int64_t>("-9223372036854775808", "t.json"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(from_json<uint64_t>("18446744073709551615", "t.json"), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(error_of([] { from_json<int64_t>("18446744073709551615", "t.json"); }).code(), ExitCode::data);
  EXPECT_TRUE(parsed("1.0").is_number() && !parsed("1.0").is_integer());
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
