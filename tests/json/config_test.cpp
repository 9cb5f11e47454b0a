// The field table: reading, limits, origins, overrides, writing. The meaning of a run's sections is tested in run_config_test.cpp.
#include "mantissa/json/config.h"

#include <gmock/gmock.h>

#include <map>

#include "error_messages.h"
#include "json_values.h"
#include "mantissa/base/text.h"

namespace mantissa::config_test {

using test::error_of;
using test::TemporaryFolder;
using test::write_file;
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
  EXPECT_EQ(effective_config(read("{}").config), effective_config(Sample{})) << "what is missing keeps its default";
}

// Every key that a source gives, with its value, if it is no object or list, and its origin.
std::string given_values(const Read& r) {
  std::map<std::string, std::string> shown;  // by key
  const Json values = test::json(effective_config(r.config));
  for (const auto& [key, leaf] : leaves_of(values)) {
    shown[key] = "=" + leaf->dump();
    for (size_t dot = key.rfind('.'); dot != std::string::npos; dot = key.rfind('.', dot - 1)) shown[key.substr(0, dot)] = "";
  }
  std::string out;
  for (const auto& [key, value] : shown)
    if (r.report.given(key)) out += text(' ', key, value, " (", r.report.origin(key), ")");
  return out;
}

TEST(ConfigFieldsMessages, AreTheExpectedOnes) {
  test::expect_messages("config_fields", [](const std::string& input) {
    std::vector<std::string> parts;
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 7) {
      end = input.find(" --set ", begin);
      parts.push_back(input.substr(begin, end - begin));
    }
    Read r;
    const ConfigSources sources{.file = "c.json", .text = parts[0], .sets = {parts.begin() + 1, parts.end()}};
    read_config(sources, fields_of(r.config), r.report, {{"train_iters", "count"}});
    return test::outcome_of([&] { r.report.throw_if_failed(); }) + (r.report.ok() ? given_values(r) : "");
  });
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
  EXPECT_FALSE(r.report.given("inner.small") || r.report.given("inner.path"));
  EXPECT_FALSE(read(R"({"list": [{}]})").report.given("list.0x")) << "no number of an entry";
  EXPECT_EQ(r.report.origin("inner.small"), "derived");
  EXPECT_EQ(r.report.place("inner.small").origin, "c.json:1:11");  // that of the object above
  EXPECT_EQ(r.report.place("rate").origin, "c.json:1:1");
}

TEST(Config, SetThatIsRefusedChangesNothing) {
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
  EXPECT_EQ(test::replaced(given_values(r), folder.path().string() + "/", ""),
            " count=7 (--set count=7) inner (b.json:1:23) inner.path=\"p\" (a.json:2:32) inner.small=3 (b.json:1:33) list (b.json:1:45)"
            " list.0 (b.json:1:46) rate=0.25 (a.json:1:22)");
  EXPECT_EQ(r.report.origin("list.0.small"), "default") << "the list of b.json replaced that of a.json";
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

// Members that --set gives go over values from elsewhere; an object that a source holds is that of the source alone.
TEST(ConfigSection, IsReadOverOtherValues) {
  const auto read = [](const std::string& text, std::vector<std::string> sets, Sample& config) {
    ConfigReport report;
    read_config({.file = "a.json", .text = text, .sets = std::move(sets)}, fields_of(config), report);
    EXPECT_TRUE(report.ok());
    return report;
  };
  Sample config;
  ConfigReport report = read("{}", {"inner.small=3"}, config);
  EXPECT_TRUE(report.made_of_members("inner"));
  EXPECT_FALSE(report.made_of_members("inner.small"));
  EXPECT_FALSE(report.made_of_members("section")) << "which nobody gave";
  Inner inner{.path = "kept", .small = 5};
  read_section("inner", fields_of(inner), report);
  EXPECT_EQ(std::pair(inner.path, inner.small), std::pair(std::string("kept"), 3));
  read_section("section", fields_of(inner), report);
  EXPECT_EQ(inner.small, 3);
  for (const auto& [text, sets] : std::vector<std::pair<std::string, std::vector<std::string>>>{{R"({"inner": {}})", {"inner.small=3"}},
                                                                                                {R"({"inner": {"small": 1}})", {}},
                                                                                                {"{}", {R"(inner={"small": 3})"}},
                                                                                                {"{}", {"inner={}", "inner.small=3"}}})
    EXPECT_FALSE(read(text, sets, config).made_of_members("inner")) << text;
  // A section that may be null keeps what it has.
  config.section = Inner{.path = "kept", .small = 5};
  read(R"({"section": {"small": 2}})", {}, config);
  EXPECT_EQ(config.section->path, "kept");
}

TEST(NearestName, CountsInsertionsDeletionsReplacementsAndSwaps) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("weight_deacy", "weight_decay"), 1u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  const std::tuple<const char*, std::vector<std::string>, const char*> cases[] = {
      {"lr", {"dir", "lr2"}, "lr2"},
      {"x", {"lr", "eps"}, ""},
      {"mxfp4", {"mxfp8", "mxfp4_qat_mxfp8_act", "mxfp4_qat"}, "mxfp4_qat"},  // the shortest name that begins with it
      {"fp8", {"fp32", "fp8_block"}, "fp8_block"},
      {"rmsnorm", {"layer", "rms"}, "rms"},
      {"wrmp_steps", {"warmup_steps"}, "warmup_steps"},
      {"wrm_steps", {"warmup_steps"}, ""},
      {"warm", {"steps", "warmup_steps"}, "warmup_steps"}};
  for (const auto& [name, candidates, nearest] : cases) EXPECT_EQ(nearest_name(name, candidates), nearest) << name;
}

}  // namespace mantissa::config_test
