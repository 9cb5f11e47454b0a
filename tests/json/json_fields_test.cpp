// Structs with fields() from JSON that programs wrote, and to it.
#include "json/json_fields.h"

#include <gmock/gmock.h>

#include <array>
#include <cmath>

#include "base/hash.h"
#include "error_messages.h"
#include "json_values.h"
#include "mantissa/json/config.h"

namespace mantissa::json_fields_test {

using test::error_of;
using ::testing::ElementsAre;

enum class Color { red, green };
constexpr auto choices(Color) { return std::array{Choice{"red", Color::red}, Choice{"green", Color::green}}; }

struct Point {
  int x = 1, y = 2;
  void fields(auto& v) {
    v("x", x, limits::not_negative);
    v("y", y);
  }
};

struct Record {
  bool flag = false;
  uint16_t small = 3;
  uint64_t large = 4;
  double number = 0.5;
  std::string word = "w";
  Color color = Color::green;
  Hash64 hash{0xab};
  std::optional<double> maybe;
  std::optional<Point> place;
  std::vector<Point> points;
  std::vector<int64_t> counts = {7};
  std::map<uint16_t, int64_t> by_code;
  std::string raw = "null";
  int64_t newer = 5;

  void fields(auto& v) {
    v("flag", flag);
    v("small", small);
    v("large", large);
    v("number", number, limits::fraction);
    v("word", word);
    v("color", color);
    v("hash", hash);
    v("maybe", maybe);
    v("place", place);
    v("points", points);
    v("counts", counts, limits::not_negative);
    v("by_code", by_code, limits::not_negative);
    v("raw", raw, limits::json);
    v("newer", newer, limits::later);
  }
};

using ByText = std::map<std::string, int64_t>;
struct Named {
  ByText counts;
  void fields(auto& v) { v("counts", counts); }
};

const std::string kWhole =
    R"({"flag":true,"small":65535,"large":18446744073709551615,"number":0.25,"word":"é\n","color":"red","hash":"00000000000000ff",)"
    R"("maybe":1.5,"place":{"x":0,"y":-2},"points":[{"x":3,"y":4},{"x":5,"y":6}],"counts":[0,9],"by_code":{"9":1,"127":2},)"
    R"("raw":{"a":[1,null],"b":"x"},"newer":8})";

// The whole record with the value at a JSON pointer replaced, or removed.
std::string changed(const std::string& pointer, const std::string& value = "") {
  Json all = test::json(kWhole);
  test::set_at(all, pointer, value.empty() ? std::nullopt : std::optional(test::json(value)));
  return all.dump();
}

std::string problem(const std::string& content) {
  return test::outcome_of([&] { from_json<Record>(content, "a.json", UnknownNames::refused); });
}

TEST(JsonFieldsMessages, AreTheExpectedOnes) {
  test::expect_messages("json_fields", [](const std::string& input) {
    const size_t space = input.find(' ');
    return problem(changed(input.substr(0, space), space == std::string::npos ? "" : input.substr(space + 1)));
  });
  EXPECT_EQ(problem("[1]"), "4, a.json: must be an object, got [1]");
  EXPECT_TRUE(problem("{").starts_with("4, a.json:1:2: "));
}

TEST(JsonFields, WhatIsReadIsWrittenAgainByteByByte) { EXPECT_EQ(json_text(from_json<Record>(kWhole, "a.json")), kWhole); }

TEST(JsonFields, MembersHoldWhatTheTextSays) {
  const auto record = from_json<Record>(kWhole, "a.json", UnknownNames::refused);
  EXPECT_TRUE(record.flag);
  EXPECT_EQ(record.large, 18446744073709551615U);
  EXPECT_EQ(record.color, Color::red);
  EXPECT_EQ(record.hash, Hash64{0xff});
  EXPECT_EQ(record.place->y, -2);
  EXPECT_EQ(record.points.at(1).x, 5);
  EXPECT_THAT(record.counts, ElementsAre(0, 9));
  EXPECT_THAT(from_json<Record>(changed("/counts", "[]"), "a.json").counts, ElementsAre()) << "nothing of the default is left";
  EXPECT_THAT(record.by_code, ElementsAre(std::pair(9, 1), std::pair(127, 2)));
  EXPECT_EQ(record.raw, R"({"a":[1,null],"b":"x"})");
}

TEST(JsonFields, NullAndAbsentMembersAndUnknownNames) {
  EXPECT_FALSE(from_json<Record>(changed("/maybe", "null"), "a.json").maybe);
  EXPECT_FALSE(from_json<Record>(changed("/place", "null"), "a.json").place);
  EXPECT_TRUE(std::isnan(from_json<Record>(changed("/number", "null"), "a.json").number));
  EXPECT_EQ(from_json<Record>(changed("/newer"), "a.json", UnknownNames::refused).newer, 5) << "which earlier versions lack";
  EXPECT_EQ(json_text(from_json<Record>(changed("/other", "1"), "a.json")), kWhole);
}

TEST(JsonFields, AnIntegerBeyondItsTypeIsToldWhatTypeAndLimitsLeave) {
  const auto bounded = [](const Limits& limits, const Json& value) {
    int64_t member = 0;
    return detail::mismatch(detail::field_of(member, "n", "", limits), value);
  };
  EXPECT_EQ(bounded({.max = 1e30}, 9223372036854775808U),
            "must be in [-9223372036854775808, 9223372036854775807], got 9223372036854775808");
  EXPECT_EQ(bounded({.min = -2, .above_min = true}, 9223372036854775808U), "must be in (-2, 9223372036854775807], got 9223372036854775808");
}

TEST(JsonFields, AnyTextIsANameInAMapOfTexts) {
  const std::string content = R"({"counts":{"":1," x":2,"a b":3,"é\n":4}})";
  const auto named = from_json<Named>(content, "a.json");
  EXPECT_EQ(named.counts, (ByText{{"", 1}, {" x", 2}, {"a b", 3}, {"é\n", 4}}));
  EXPECT_EQ(json_text(named), content);
}

TEST(JsonFields, MapsOfNumbersAreNotForConfigurations) {
  Record config;
  ConfigReport report;
  const ConfigSources sources{.file = "c.json", .text = R"({"by_code": {"x": 1}})", .sets = {}};
  EXPECT_STREQ(error_of([&] { read_config(sources, fields_of(config), report); }).what(),
               "by_code.x: the names of a map in a config are strings");
  EXPECT_STREQ(error_of([&] { config_schema(fields_of(config), "t"); }).what(), "by_code: the names of a map in a config are strings");
}

TEST(JsonFields, LongValuesAndNamesAreCut) {
  const std::string name(1000, 'n');
  EXPECT_LT(problem(changed("/flag", '"' + name + '"')).size(), 120U);
  EXPECT_LT(problem(changed("/" + name, "1")).size(), 120U);
}

TEST(JsonText, ReplacesWhatJsonCannotSay) {
  EXPECT_EQ(json_text(std::vector<double>{0.1, std::nan(""), -HUGE_VAL}), "[0.1,null,null]");
  EXPECT_EQ(json_text(std::string("a\xff\"\n")), "\"a\xef\xbf\xbd\\\"\\n\"");
  EXPECT_EQ(json_text(Point{}), R"({"x":1,"y":2})");
  Record wrong;
  wrong.raw = "{\"a\":";
  EXPECT_EQ(error_of([&] { json_text(wrong); }).code(), ExitCode::internal);
}

TEST(JsonReader, NamesThePlaceOfWhatItIsAskedFor) {
  const Json root = parse_json(R"({"files": [{"file": "a"}, {"file": 5}]})", "m.json");
  const JsonReader reader(root, "m.json");
  const std::vector<JsonReader> files = reader.at("files").entries();
  EXPECT_EQ(files.at(0).at("file").as<std::string>(), "a");
  const auto message = [](auto&& body) { return std::string(error_of(body).what()); };
  EXPECT_EQ(message([&] { files.at(1).at("file").as<std::string>(); }), "m.json: files[1].file: must be a string, got 5");
  EXPECT_EQ(message([&] { files.at(1).at("name"); }), "m.json: files[1]: has no \"name\"");
  EXPECT_EQ(message([&] { files.at(1).at("file").at("name"); }), "m.json: files[1].file: must be an object, got 5");
  EXPECT_EQ(message([&] { reader.entries(); }), "m.json: must be a list, got {\"files\":[{\"file\":\"a\"},{\"file\":5}]}");
  EXPECT_EQ(message([&] { files.at(0).as<Point>(); }), "m.json: files[0]: has no \"x\"");
  EXPECT_EQ(message([&] { files.at(0).require(false, "is ", 1); }), "m.json: files[0]: is 1");
}

}  // namespace mantissa::json_fields_test
