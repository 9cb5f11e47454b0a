// The field table: reading, limits, origins, overrides, writing. What the sections of a run mean is in run_config_test.cpp.
#include "mantissa/json/config.h"

#include <gmock/gmock.h>

#include "files.h"
#include "json_values.h"
#include "mantissa/base/nearest.h"

namespace mantissa::config_test {

using test::error_of;
using test::TemporaryFolder;
using test::write_file;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

enum class Color { red, green };
constexpr auto choices(Color) { return std::array{Choice{"red", Color::red}, Choice{"green", Color::green}}; }

struct Inner {
  std::string path;
  int small = 1;
  void fields(auto& v) {
    v("path", path, "a file", limits::input_path);
    v("small", small, "an int", limits::between(-5, 5));
  }
};

struct Switch {
  static constexpr const char* kShortForm = "on";
  bool on = false, left = true;
  void fields(auto& v) {
    v("on", on, "a switch");
    v("left", left, "another");
  }
};

struct Sample {
  bool flag = false;
  int64_t count = 3;
  uint64_t seed = 4;
  int narrow = 0;
  double rate = 0.1;
  std::string name = "x";
  Color color = Color::red;
  std::optional<int64_t> maybe = 20;
  std::optional<Inner> section;
  std::vector<Inner> list;
  std::vector<std::string> words = {"a"};
  Inner inner;
  std::map<std::string, Inner> named;
  Switch lamp;
  void fields(auto& v) {
    v("flag", flag, "a flag");
    v("count", count, "a count", limits::positive);
    v("seed", seed, "any 64 bits");
    v("narrow", narrow, "an int");
    v("rate", rate, "a rate", limits::fraction);
    v("name", name, "a name");
    v("color", color, "a color");
    v("maybe", maybe, "a number or null", limits::positive);
    v("section", section, "an optional section");
    v("list", list, "several");
    v("words", words, "texts");
    v("inner", inner, "a section");
    v("named", named, "sections by name");
    v("lamp", lamp, "a section with a short form");
  }
};

struct Read {
  Sample config;
  ConfigReport report;
  std::string errors() const {
    return report.ok() ? "" : error_of([&] { report.throw_if_failed(); }).what();
  }
};

Read read(const std::string& content, std::vector<std::string> sets = {}) {
  Read result;
  read_config(ConfigSources{.file = "c.json", .text = content, .sets = std::move(sets)}, fields_of(result.config), result.report);
  return result;
}

TEST(Config, ReadsEveryKindOfValue) {
  const Read r =
      read(R"({"$schema": "x.json", "flag": true, "count": 9007199254740993, "seed": 18446744073709551615, "narrow": -7, "rate": 0,
    "name": "é", "color": "green", "maybe": null, "section": {"small": 2}, "list": [{"path": "p"}, {"small": -5}], "words": [], "inner": {}})");
  ASSERT_EQ(r.errors(), "");
  EXPECT_TRUE(r.config.flag);
  EXPECT_EQ(r.config.count, 9007199254740993);
  EXPECT_EQ(r.config.seed, 18446744073709551615u);
  EXPECT_EQ(r.config.narrow, -7);
  EXPECT_EQ(r.config.rate, 0.0);
  EXPECT_EQ(r.config.name, "é");
  EXPECT_EQ(r.config.color, Color::green);
  EXPECT_EQ(r.config.maybe, std::nullopt);
  EXPECT_EQ(r.config.section.value().small, 2);
  ASSERT_EQ(r.config.list.size(), 2u);
  EXPECT_EQ(r.config.list[0].path, "p");
  EXPECT_EQ(r.config.list[1].small, -5);
  EXPECT_TRUE(r.config.words.empty());
}

TEST(Config, MissingKeysKeepTheirDefaults) {
  const Read r = read("{}");
  EXPECT_EQ(r.errors(), "");
  EXPECT_EQ(effective_config(r.config), effective_config(Sample{}));
  EXPECT_EQ(r.config.maybe, 20);
}

TEST(Config, WrongTypesSayWhatWasWantedAndWhatWasFound) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"flag": 1})", "flag: must be true or false, got 1   (c.json:1:10)"},
      {R"({"count": 1.5})", "count: must be an integer, got 1.5   (c.json:1:11)"},
      {R"({"count": 1.0})", "count: must be an integer, got 1.0   (c.json:1:11)"},
      {R"({"count": true})", "count: must be an integer, got true   (c.json:1:11)"},
      {R"({"count": null})", "count: must be an integer, got null   (c.json:1:11)"},
      {R"({"rate": "0.1"})", "rate: must be a number, got \"0.1\"   (c.json:1:10)"},
      {R"({"name": 7})", "name: must be a string, got 7   (c.json:1:10)"},
      {R"({"maybe": "no"})", "maybe: must be an integer or null, got \"no\"   (c.json:1:11)"},
      {R"({"color": "gren"})", "color: must be one of red, green, got \"gren\"; did you mean 'green'?   (c.json:1:11)"},
      {R"({"section": []})", "section: must be an object or null, got []   (c.json:1:13)"},
      {R"({"list": {}})", "list: must be a list, got {}   (c.json:1:10)"},
      {R"({"list": [{}, 3]})", "list.1: must be an object, got 3   (c.json:1:15)"},
      {R"({"words": ["a", 3]})", "words.1: must be a string, got 3   (c.json:1:17)"},
      {R"([])", "c.json:1:1: a config must be an object { ... }, got array"},
  };
  for (const auto& [content, message] : cases) EXPECT_EQ(read(content).errors(), message) << content;
}

TEST(Config, RangesAreThoseOfTheFieldAndOfItsType) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"count": 0})", "count: must be positive, got 0   (c.json:1:11)"},
      {R"({"count": 9223372036854775808})", "count: must be in (0, 9223372036854775807], got 9223372036854775808   (c.json:1:11)"},
      {R"({"seed": -1})", "seed: must be in [0, 18446744073709551615], got -1   (c.json:1:10)"},
      {R"({"narrow": 2147483648})", "narrow: must be in [-2147483648, 2147483647], got 2147483648   (c.json:1:12)"},
      {R"({"rate": 1})", "rate: must be below 1, got 1   (c.json:1:10)"},
      {R"({"maybe": 0})", "maybe: must be positive or null, got 0   (c.json:1:11)"},
      {R"({"inner": {"small": -6}})", "inner.small: must be at least -5, got -6   (c.json:1:21)"},
      {R"({"inner": {"small": 6}})", "inner.small: must be at most 5, got 6   (c.json:1:21)"},
  };
  for (const auto& [content, message] : cases) EXPECT_EQ(read(content).errors(), message) << content;
}

TEST(Config, UnknownKeysNameTheNearestOne) {
  const ForeignNames foreign = {{"train_iters", "count"}};
  const auto errors = [&](const std::string& content) {
    Read r;
    read_config(ConfigSources{.file = "c.json", .text = content}, fields_of(r.config), r.report, foreign);
    return r.errors();
  };
  EXPECT_EQ(errors(R"({"coutn": 1})"), "coutn: unknown key; did you mean 'count'?   (c.json:1:2)");
  EXPECT_EQ(errors(R"({"col": 1})"), "col: unknown key; did you mean 'color'?   (c.json:1:2)");
  EXPECT_EQ(errors(R"({"small": 1})"), "small: unknown key; did you mean 'inner.small'?   (c.json:1:2)");
  EXPECT_EQ(errors(R"({"--train-iters": 1})"), "--train-iters: unknown key; here it is 'count'   (c.json:1:2)");
  EXPECT_EQ(errors("{\"a\\u001b[2Kb\\n\": 1}"), "a\\x1b[2Kb\\x0a: unknown key   (c.json:1:2)");
  EXPECT_EQ(errors(R"({"zebra": 1})"), "zebra: unknown key   (c.json:1:2)");
  EXPECT_EQ(errors(R"({"inner": {"$schema": 1}})"), "inner.$schema: unknown key   (c.json:1:12)");
  EXPECT_EQ(errors(R"({"list": [{}, {"pth": "x"}]})"), "list.1.pth: unknown key; did you mean 'path'?   (c.json:1:16)");
  EXPECT_EQ(errors(R"({"list": [{"$schema": 1}]})"), "list.0.$schema: unknown key   (c.json:1:12)");
}

TEST(Config, AMapHasAnEntryForEachNameOfTheFile) {
  const Read r = read(R"({"named": {"a": {"small": 2}, "b-2": {"path": "p"}}})", {"named.a.path=q", "named.c.small=3"});
  ASSERT_EQ(r.errors(), "");
  ASSERT_EQ(r.config.named.size(), 3u);
  EXPECT_EQ(r.config.named.at("a").small, 2);
  EXPECT_EQ(r.config.named.at("a").path, "q");
  EXPECT_EQ(r.config.named.at("b-2").path, "p");
  EXPECT_EQ(r.config.named.at("c").small, 3);
  EXPECT_EQ(r.report.origin("named.c.small"), "--set named.c.small=3");
  EXPECT_EQ(read(R"({"named": []})").errors(), "named: must be an object, got []   (c.json:1:11)");
  EXPECT_EQ(read(R"({"named": {"a": 1}})").errors(), "named.a: must be an object, got 1   (c.json:1:17)");
  EXPECT_EQ(read(R"({"named": {"a": {"smal": 1}}})").errors(), "named.a.smal: unknown key; did you mean 'small'?   (c.json:1:18)");
  EXPECT_EQ(read(R"({"named": {"a.b": {}}})").errors(), "named.a.b: a name has letters, digits, '_' and '-' only   (c.json:1:12)");
  EXPECT_THAT(read("{\"named\": {\"\": {}, \"\\u001b[2K\": {}}}").errors(), HasSubstr("2 errors"));
}

TEST(Config, AShortFormStandsForOneMember) {
  EXPECT_TRUE(read(R"({"lamp": true})").config.lamp.on);
  EXPECT_TRUE(read(R"({"lamp": true})").config.lamp.left);
  EXPECT_FALSE(read(R"({"lamp": {"left": false}})").config.lamp.left);
  const Read r = read(R"({"lamp": false})", {"lamp.on=true"});
  EXPECT_EQ(r.errors(), "");
  EXPECT_TRUE(r.config.lamp.on);
  EXPECT_EQ(read(R"({"lamp": true})").report.origin("lamp.on"), "c.json:1:10");
  EXPECT_EQ(read(R"({"lamp": 1})").errors(), "lamp: must be an object or true or false, got 1   (c.json:1:10)");
}

TEST(Config, AnObjectOnTheCommandLineGivesItsMembers) {
  const Read r = read("{}", {"inner={\"small\": 4}", "list=[{\"path\": \"7\"}]"});
  ASSERT_EQ(r.errors(), "");
  EXPECT_TRUE(r.report.given("inner.small"));
  EXPECT_FALSE(r.report.given("inner.path"));
  EXPECT_EQ(r.report.origin("list.0.path"), "--set list=[{\"path\": \"7\"}]");
  EXPECT_FALSE(r.report.given("list.0x")) << "no number of an entry";
  EXPECT_EQ(r.config.list.at(0).path, "7");
}

TEST(Config, OnlyAWholeArgumentIsTextWithoutQuotes) {
  EXPECT_EQ(read("{}", {"inner={\"path\": 7}"}).errors(), "inner.path: must be a string, got 7   (--set inner={\"path\": 7})");
  EXPECT_EQ(read("{}", {"words=[7]"}).errors(), "words.0: must be a string, got 7   (--set words=[7])");
  EXPECT_EQ(read(R"({"inner": {"path": 7}})", {"inner.small=1"}).errors(), "inner.path: must be a string, got 7   (c.json:1:20)");
}

TEST(Config, WhatAnArgumentWalksThroughKeepsItsPlace) {
  const Read r = read(R"({"inner": {"small": 2}, "list": [{}]})", {"inner.path=p", "list.0.small=3", "section.small=1", "section.path=p"});
  ASSERT_EQ(r.errors(), "");
  EXPECT_EQ(r.report.origin("inner"), "c.json:1:11");
  EXPECT_EQ(r.report.origin("inner.small"), "c.json:1:21");
  EXPECT_EQ(r.report.origin("inner.path"), "--set inner.path=p");
  EXPECT_EQ(r.report.origin("list.0"), "c.json:1:34");
  EXPECT_EQ(r.report.origin("section"), "--set section.small=1");  // it was made by that
}

TEST(Config, ErrorsOfOneArgumentComeInTheOrderOfNames) {
  EXPECT_EQ(read("{}", {"inner={\"small\": 9, \"path\": 1}", "rate=2"}).errors(),
            "3 errors in the configuration:\n"
            "  inner.path: must be a string, got 1   (--set inner={\"small\": 9, \"path\": 1})\n"
            "  inner.small: must be at most 5, got 9   (--set inner={\"small\": 9, \"path\": 1})\n"
            "  rate: must be below 1, got 2   (--set rate=2)");
}

TEST(Config, FailureIsThatOfTheKeyAndOfAllAboveAndBelow) {
  Read r = read(R"({"inner": {"small": 9}, "list": [{}, {"small": "x"}], "flag": 1})");
  for (const char* const failed : {"inner", "inner.small", "list", "list.1", "list.1.small", "flag", "flag.below"})
    EXPECT_TRUE(r.report.failed(failed)) << failed;
  for (const char* const right : {"inner.path", "list.0", "list.0.small", "list.1.path", "lis", "rate"})
    EXPECT_FALSE(r.report.failed(right)) << right;
  r.report.error("section.path", "is missing");  // which no source gives
  EXPECT_TRUE(r.report.failed("section"));
  EXPECT_TRUE(r.report.failed("section.path.below"));
  EXPECT_FALSE(r.report.failed("section.small"));
  EXPECT_FALSE(r.report.failed("sect"));
  r = read(R"({"inner": {"small": 2}, "list": [{}]})");
  r.report.error("inner.small", "is another's");
  EXPECT_TRUE(r.report.failed("inner"));
  r.report.error("list.0.path", "is missing");
  EXPECT_TRUE(r.report.failed("list"));
  EXPECT_TRUE(r.report.failed("list.0"));
}

TEST(Config, ADerivedValueIsNoLongerGiven) {
  Read r = read(R"({"inner": {"small": 2}})");
  r.report.derive("inner.small");
  r.report.derive("inner.path");
  EXPECT_FALSE(r.report.given("inner.small"));
  EXPECT_FALSE(r.report.given("inner.path"));
  EXPECT_EQ(r.report.origin("inner.small"), "derived");
  EXPECT_EQ(r.report.place("inner.small").origin, "c.json:1:11");  // of the object above
  EXPECT_EQ(r.report.place("rate").origin, "c.json:1:1");
}

TEST(Config, AllErrorsComeAtOnceInTheOrderOfTheFile) {
  const std::string errors = read("{\"rate\": 2,\n \"flagg\": 1,\n \"count\": 0}", {"name=y", "narrow=x", "bad"}).errors();
  EXPECT_EQ(errors,
            "5 errors in the configuration:\n"
            "  rate: must be below 1, got 2   (c.json:1:10)\n"
            "  flagg: unknown key; did you mean 'flag'?   (c.json:2:2)\n"
            "  count: must be positive, got 0   (c.json:3:11)\n"
            "  narrow: must be an integer, got \"x\"   (--set narrow=x)\n"
            "  --set bad: expected KEY=VALUE, for example --set optimizer.lr=3e-4");
}

TEST(Config, SetTakesJsonElseText) {
  const Read r = read(R"({"list": [{"path": "a"}], "section": null})",
                      {"rate=2.5e-1", "name=7", "maybe=null", "list.0.path=b", "list.1.small=2", "section.small=3", "words=[\"p\", \"q\"]",
                       "inner={\"small\": 4}", "color=green", "rate=0.75"});
  ASSERT_EQ(r.errors(), "");
  EXPECT_EQ(r.config.rate, 0.75);
  EXPECT_EQ(r.config.name, "7");
  EXPECT_EQ(r.config.maybe, std::nullopt);
  EXPECT_EQ(r.config.list.at(0).path, "b");
  EXPECT_EQ(r.config.list.at(1).small, 2);
  EXPECT_EQ(r.config.section.value().small, 3);
  EXPECT_THAT(r.config.words, ElementsAre("p", "q"));
  EXPECT_EQ(r.config.inner.small, 4);
  EXPECT_EQ(r.config.color, Color::green);
}

TEST(Config, SetRefusesWhatLeadsNowhere) {
  EXPECT_THAT(read(R"({"list": []})", {"list.1.path=a"}).errors(), HasSubstr("'1' is no entry of a list with 0"));
  EXPECT_THAT(read(R"({"list": []})", {"list.x.path=a"}).errors(), HasSubstr("'x' is no entry"));
  EXPECT_THAT(read("{}", {"rat=1"}).errors(), HasSubstr("rat: unknown key; did you mean 'rate'?   (--set rat=1)"));
  EXPECT_THAT(read("{}", {"=1"}).errors(), HasSubstr("expected KEY=VALUE"));
  EXPECT_THAT(read("{}", {"inner..small=1"}).errors(), HasSubstr("expected KEY=VALUE"));
  EXPECT_EQ(read("{}", {"rate=1e400"}).report.errors(), 1U);
  EXPECT_THAT(read("{}", {"rate=1e400"}).errors(), ::testing::AllOf(HasSubstr("rate: number overflow"), HasSubstr("(--set rate=1e400)")));
  EXPECT_THAT(read("{}", {"inner.small=99999999999999999999"}).errors(),
              HasSubstr("inner.small: integer beyond 64 bits: 99999999999999999999"));
  EXPECT_EQ(read("{}", {"name=007"}).errors(), "") << "is a text";
  EXPECT_THAT(read("{}", {"rate.x=1"}).errors(), HasSubstr("rate: must be a number, got {\"x\":1}"));
  const Read refused = read(R"({"list": [{"path": "p"}]})", {"list.3.path=a", "list.x.path=a", "rate.x=1", "rate=1e400", "inner..small=1"});
  ASSERT_EQ(refused.config.list.size(), 1U);
  EXPECT_EQ(refused.config.list[0].path, "p");
  EXPECT_EQ(refused.config.rate, Sample().rate);
  EXPECT_EQ(refused.config.inner.small, Sample().inner.small);
}

TEST(Config, LaterSourcesWinAndOriginsSayWhere) {
  const TemporaryFolder folder;
  write_file(folder / "a.json",
             "{\"count\": 1, \"rate\": 0.25,\n \"inner\": {\"small\": 2, \"path\": \"p\"}, \"list\": [{\"small\": 1}, {}]}");
  write_file(folder / "b.json", "{\"count\": 5, \"inner\": {\"small\": 3}, \"list\": [{}]}");
  Read r;
  read_config(ConfigSources{.file = folder / "a.json", .set_files = {folder / "b.json"}, .sets = {"count=7"}}, fields_of(r.config),
              r.report);
  ASSERT_EQ(r.errors(), "");
  EXPECT_EQ(r.config.count, 7);
  EXPECT_EQ(r.config.inner.small, 3);
  EXPECT_EQ(r.config.inner.path, "p");
  EXPECT_EQ(r.config.list.size(), 1u);
  EXPECT_EQ(r.report.origin("count"), "--set count=7");
  EXPECT_EQ(r.report.origin("inner"), folder / "b.json:1:23");
  EXPECT_EQ(r.report.origin("inner.small"), folder / "b.json:1:33");
  EXPECT_EQ(r.report.origin("inner.path"), folder / "a.json:2:32");
  EXPECT_EQ(r.report.origin("name"), "default");
  EXPECT_EQ(r.report.origin("list.0.small"), "default");  // the list of b.json replaced that of a.json
}

TEST(Config, AnErrorAboutAKeyOfTwoFilesNamesTheLaterOne) {
  const TemporaryFolder folder;
  write_file(folder / "a.json", "{\"oops\": {\"x\": 1}}");
  write_file(folder / "b.json", "{\n\"rate\": 7, \"oops\": {\"y\": 1}}");
  Read r;
  read_config(ConfigSources{.file = folder / "a.json", .set_files = {folder / "b.json"}}, fields_of(r.config), r.report);
  EXPECT_EQ(r.errors(), "2 errors in the configuration:\n  rate: must be below 1, got 7   (" + (folder / "b.json:2:9") +
                            ")\n  oops: unknown key   (" + (folder / "b.json:2:12") + ")");
}

TEST(Config, InputPathsBelongToTheFileThatNamesThem) {
  Read r = read(R"({"inner": {"path": "x.txt"}, "list": [{"path": "../y.txt"}, {"path": "/abs/../z.txt"}, {"path": "w.txt"}]})",
                {"list.2.path=v.txt"});
  const std::filesystem::path here = std::filesystem::current_path();
  r.report.set_place("inner.path", {.origin = "/conf/c.json:1:1", .key_origin = "", .directory = "/conf", .argument = "", .order = 0});
  resolve_input_paths(fields_of(r.config), r.report);
  ASSERT_EQ(r.errors(), "");
  EXPECT_EQ(r.config.inner.path, "/conf/x.txt");
  EXPECT_EQ(r.config.list[0].path, (here / "../y.txt").lexically_normal());
  EXPECT_EQ(r.config.list[1].path, "/z.txt");
  EXPECT_EQ(r.config.list[2].path, here / "v.txt");
}

TEST(Config, TheEffectiveConfigReadsBackTheSame) {
  const Read r = read(R"({"rate": 0.1, "seed": 18446744073709551615, "section": {"path": "\"\n"}, "list": [{}, {"small": 2}],
    "named": {"b": {}, "a": {"small": 2}}, "lamp": true})");
  ASSERT_EQ(r.errors(), "");
  for (const ConfigReport* report : {static_cast<const ConfigReport*>(nullptr), &r.report}) {
    const std::string written = effective_config(r.config, report);
    EXPECT_EQ(effective_config(config_from_json<Sample>(written, "written", ExitCode::internal)), effective_config(r.config)) << written;
  }
  EXPECT_THAT(effective_config(r.config), Not(HasSubstr("//")));
  EXPECT_THAT(effective_config(r.config, &r.report), HasSubstr("\"rate\": 0.1,  // c.json:1:10\n"));
  EXPECT_EQ(error_of([] { config_from_json<Sample>("{\"flag\": 0}", "manifest", ExitCode::data); }).code(), ExitCode::data);
}

TEST(Config, FilesThatCannotBeReadAreNamed) {
  const TemporaryFolder folder;
  Read r;
  read_config(ConfigSources{.file = folder / "none.json", .set_files = {folder.path().string()}}, fields_of(r.config), r.report);
  EXPECT_THAT(r.errors(), HasSubstr("none.json: no such file"));
  EXPECT_THAT(r.errors(), HasSubstr(": not a regular file"));
  EXPECT_EQ(error_of([&] { r.report.throw_if_failed(); }).code(), ExitCode::usage);
}

TEST(Config, SchemaHoldsTypesLimitsAndDefaults) {
  Sample scratch;
  const Json schema = test::json(config_schema(fields_of(scratch), "t"));
  const auto& properties = schema.at("properties");
  EXPECT_EQ(schema.at("additionalProperties"), false);
  EXPECT_EQ(properties.at("count"), test::json(R"({"type": "integer", "description": "a count", "default": 3, "exclusiveMinimum": 0})"));
  EXPECT_EQ(properties.at("maybe").at("type"), test::json(R"(["integer", "null"])"));
  EXPECT_EQ(properties.at("color").at("enum"), test::json(R"(["red", "green"])"));
  EXPECT_EQ(properties.at("words").at("default"), test::json(R"(["a"])"));
  EXPECT_EQ(properties.at("section").at("default"), nullptr);
  EXPECT_EQ(properties.at("list").at("items").at("properties").at("small").at("maximum"), 5);
  EXPECT_EQ(properties.at("rate").at("exclusiveMaximum"), 1);
  EXPECT_EQ(properties.at("named").at("default"), Json(Json::Members()));
  EXPECT_EQ(properties.at("named").at("additionalProperties").at("properties").at("small").at("maximum"), 5);
  EXPECT_EQ(properties.at("lamp").at("type"), test::json(R"(["object", "boolean"])"));
}

TEST(NearestName, CountsInsertionsDeletionsReplacementsAndSwaps) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("weight_deacy", "weight_decay"), 1u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(nearest_name("lr", {"dir", "lr2"}), "lr2");
  EXPECT_EQ(nearest_name("x", {"lr", "eps"}), "");
  EXPECT_EQ(nearest_name("mxfp4", {"mxfp8", "mxfp4_qat_mxfp8_act", "mxfp4_qat"}), "mxfp4_qat") << "what it begins, the shortest";
  EXPECT_EQ(nearest_name("fp8", {"fp32", "fp8_block"}), "fp8_block");
  EXPECT_EQ(nearest_name("rmsnorm", {"layer", "rms"}), "rms");
  EXPECT_EQ(nearest_name("wrmp_steps", {"warmup_steps"}), "warmup_steps");
  EXPECT_EQ(nearest_name("wrm_steps", {"warmup_steps"}), "");
  EXPECT_EQ(nearest_name("warm", {"steps", "warmup_steps"}), "warmup_steps");
}

}  // namespace mantissa::config_test
