// Rules: the modules that a pattern matches, the rule that a module takes, and the errors with the names that were meant.
#include <gmock/gmock.h>

#include "files.h"
#include "mantissa/precision/rules.h"

namespace mantissa::precision_rules_test {

using test::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<RuledModule> modules_of(int64_t layers) {
  std::vector<RuledModule> modules = {{"embed", ModuleKind::embedding}};
  for (int64_t i = 0; i < layers; ++i) {
    const std::string layer = text("layers.", i, '.');
    for (const char* const name : {"attn_norm", "mlp_norm", "attn.q_norm"}) modules.push_back({layer + name, ModuleKind::norm});
    for (const char* const name : {"attn.qkv", "attn.out", "moe.experts.gate_up", "moe.experts.down", "mlp.gate_up", "mlp.down"}) {
      modules.push_back({layer + name, ModuleKind::linear});
    }
    modules.push_back({layer + "moe.router", ModuleKind::router});
  }
  modules.push_back({"final_norm", ModuleKind::norm});
  modules.push_back({"output", ModuleKind::output});
  return modules;
}

struct Assigned {
  std::vector<RuledModule> modules = modules_of(12);
  std::vector<std::optional<size_t>> rules;
  ConfigReport report;

  std::string errors() const {
    return report.ok() ? "" : error_of([&] { report.throw_if_failed(); }).what();
  }
  // The rule of one module; -1: none.
  int rule_of(const std::string& path) const {
    for (size_t i = 0; i < modules.size(); ++i) {
      if (modules[i].path == path) return rules.at(i) ? static_cast<int>(*rules.at(i)) : -1;
    }
    ADD_FAILURE() << "no module " << path;
    return -2;
  }
  std::vector<std::string> matched() const {
    std::vector<std::string> paths;
    for (size_t i = 0; i < modules.size(); ++i) {
      if (rules.at(i)) paths.push_back(modules[i].path);
    }
    return paths;
  }
};

Assigned assign(const std::vector<std::string>& patterns) {
  std::vector<RuleConfig> rules;
  for (const std::string& pattern : patterns) rules.push_back({.match = pattern, .recipe = "high"});
  Assigned a;
  a.rules = assign_rules(rules, a.modules, a.report);
  return a;
}

bool matches(const std::string& pattern, const std::string& path) { return Pattern(pattern, 12).matches(path); }

TEST(Pattern, GlobsAreAnchoredAndAStarRunsOverDots) {
  EXPECT_TRUE(matches("layers.*.mlp.*", "layers.3.mlp.gate_up"));
  EXPECT_TRUE(matches("layers.*.down", "layers.3.moe.experts.down"));
  EXPECT_TRUE(matches("*", "layers.3.moe.experts.down"));
  EXPECT_TRUE(matches("**.qkv**", "layers.3.attn.qkv"));
  EXPECT_FALSE(matches("mlp.*", "layers.3.mlp.gate_up"));
  EXPECT_FALSE(matches("layers.*.mlp.gate", "layers.3.mlp.gate_up"));
  EXPECT_FALSE(matches("layers.*.mlp", "layers.3.mlp.gate_up"));
  EXPECT_FALSE(matches("layersX*", "layers.3.mlp.gate_up"));
}

TEST(Pattern, AQuestionMarkIsOneCharacter) {
  EXPECT_TRUE(matches("layers.?.attn.qkv", "layers.3.attn.qkv"));
  EXPECT_FALSE(matches("layers.?.attn.qkv", "layers.10.attn.qkv"));
  EXPECT_FALSE(matches("layers.3.attn.qkv?", "layers.3.attn.qkv"));
}

TEST(Pattern, BracesAreAlternativesAndNegativeNumbersCountLayersFromTheEnd) {
  for (const char* const path : {"layers.0.attn.out", "layers.11.attn.out", "layers.0.mlp.down", "layers.11.mlp.down"}) {
    EXPECT_TRUE(matches("layers.{0,-1}.{attn.out,mlp.down}", path)) << path;
  }
  EXPECT_FALSE(matches("layers.{0,-1}.{attn.out,mlp.down}", "layers.1.attn.out"));
  EXPECT_FALSE(matches("layers.{0,-1}.{attn.out,mlp.down}", "layers.0.attn.qkv"));
  EXPECT_TRUE(matches("layers.-12.attn.out", "layers.0.attn.out"));
  EXPECT_TRUE(matches("layers.{1,}1.attn.out", "layers.11.attn.out"));
  EXPECT_TRUE(matches("layers.{1,}1.attn.out", "layers.1.attn.out"));
  EXPECT_FALSE(matches("x.{0,-1}.*", "x.11.y"));
}

TEST(Pattern, RegularExpressionsMatchTheWholePath) {
  EXPECT_TRUE(matches("re:layers\\.(\\d|10)\\.attn\\..*", "layers.10.attn.qkv"));
  EXPECT_FALSE(matches("re:layers\\.\\d\\.attn", "layers.1.attn.qkv"));
  EXPECT_FALSE(matches("re:attn.*", "layers.1.attn.qkv"));
  EXPECT_TRUE(matches("re:(?!.*mlp).*", "layers.1.attn.qkv"));
  EXPECT_TRUE(matches("re:x|layers\\.1", "layers.1"));
}

TEST(Pattern, WhatIsNoPatternIsRefused) {
  const auto message = [](const std::string& pattern) {
    return std::string(error_of([&] { Pattern(pattern, 12).matches("layers.0.attn"); }).what());
  };
  EXPECT_THAT(message(""), HasSubstr("is missing"));
  for (const char* const pattern : {"a{b", "a}b", "a{b{c}}", "{a,b"})
    EXPECT_THAT(message(pattern), HasSubstr("unbalanced braces")) << pattern;
  EXPECT_THAT(message("re:(a"), HasSubstr("is not a valid regular expression: missing closing parenthesis at character 3"));
  EXPECT_THAT(message("layers.12.x"), HasSubstr("names layer 12, but the model has 12 layers"));
  EXPECT_THAT(message("layers.{0,-13}.x"), HasSubstr("names layer -13"));
  EXPECT_THAT(message("layers.99999999999999999999.x"), HasSubstr("names layer 99999999999999999999"));
  std::string braces, stars;
  for (int i = 0; i < 30; ++i) braces += "{a,b}";
  EXPECT_THAT(message(braces), HasSubstr("expands to more than 1024 patterns"));
  EXPECT_THAT(message(std::string(5000, 'a')), HasSubstr("is longer than 4096"));
  EXPECT_THAT(error_of([] { Pattern("re:(a+)+[bc]", 12).matches(std::string(64, 'a')); }).what(), HasSubstr("match limit exceeded"));
  for (int i = 0; i < 1000; ++i) stars += "*a";
  EXPECT_FALSE(matches(stars, std::string(500, 'a') + "b"));
}

TEST(Rules, TheFirstThatMatchesWins) {
  const Assigned a = assign({"layers.{0,-1}.attn.*", "layers.*.attn.qkv", "layers.*"});
  ASSERT_EQ(a.errors(), "");
  EXPECT_EQ(a.rule_of("layers.0.attn.qkv"), 0);
  EXPECT_EQ(a.rule_of("layers.11.attn.out"), 0);
  EXPECT_EQ(a.rule_of("layers.1.attn.qkv"), 1);
  EXPECT_EQ(a.rule_of("layers.1.attn.out"), 2);
  EXPECT_EQ(a.rule_of("layers.0.mlp.down"), 2);
  EXPECT_EQ(a.rule_of("embed"), -1);
}

TEST(Rules, WildcardsPassOverEmbeddingsNormsRouterAndOutput) {
  const Assigned all = assign({"*"});
  EXPECT_EQ(all.errors(), "");
  EXPECT_EQ(all.matched().size(), 12u * 6);
  for (const char* const path : {"embed", "layers.0.attn_norm", "layers.0.attn.q_norm", "layers.0.moe.router", "final_norm", "output"}) {
    EXPECT_EQ(all.rule_of(path), -1) << path;
  }
  EXPECT_EQ(assign({"layers.*.moe.*"}).rule_of("layers.3.moe.router"), -1);
}

TEST(Rules, ALiteralLastSegmentReachesThem) {
  EXPECT_EQ(assign({"layers.*.moe.router"}).rule_of("layers.3.moe.router"), 0);
  EXPECT_EQ(assign({"*norm"}).matched().size(), 0u);
  EXPECT_THAT(assign({"embed"}).matched(), ElementsAre("embed"));
  EXPECT_THAT(assign({"layers.{0,-1}.attn_norm"}).matched(), ElementsAre("layers.0.attn_norm", "layers.11.attn_norm"));
  EXPECT_THAT(assign({"re:layers\\.[35]\\.moe\\.router"}).matched(), ElementsAre("layers.3.moe.router", "layers.5.moe.router"));
  EXPECT_EQ(assign({"re:.*router"}).matched().size(), 0u);
}

TEST(Rules, ARuleThatMatchesNothingNamesTheNearest) {
  const std::pair<const char*, const char*> cases[] = {
      {"layers.*.mpl.*", "precision.rules.0.match: \"layers.*.mpl.*\" matches no module; nearest: \"layers.*.mlp.*\""},
      {"layer.*.attn.qkv", "matches no module; nearest: \"layers.*.attn.qkv\""},
      {"layers.{0,-1}.atn.*", "nearest: \"layers.{0,-1}.attn.*\""},
      {"layers.*.moe.rooter", "nearest: \"layers.*.moe.router\""},
      {"mlp.gate_up", "nearest modules: layers.*.mlp.gate_up"},
      {"layers.*.mlp.gate", "nearest: \"layers.*.mlp.gate_up\""},
      {"re:layers\\.\\d+\\.mlp\\.gateup", "nearest modules: layers.*.mlp.gate_up, "},
      {"model.layers.*.mlp.down_proj", "nearest modules: layers.*.mlp.down"},
      {"zebra", "matches no module"},
  };
  for (const auto& [pattern, message] : cases) EXPECT_THAT(assign({pattern}).errors(), HasSubstr(message)) << pattern;
}

TEST(Rules, AWordInBracesWithWhichARuleMatchesNothingIsReported) {
  EXPECT_THAT(assign({"layers.*.mlp.{gate_up,dwn}"}).errors(),
              HasSubstr("\"layers.*.mlp.{gate_up,dwn}\" matches no module as \"layers.*.mlp.dwn\"; nearest: \"layers.*.mlp.down\""));
  EXPECT_THAT(assign({"{embd,layers.0.attn.qkv}"}).errors(), HasSubstr("as \"embd\"; nearest: \"embed\""));
  EXPECT_THAT(assign({"*{norm,qkv}"}).errors(), HasSubstr("matches no linear as \"*norm\"; to match embeddings, norms or the router"));
  EXPECT_THAT(assign({"layers.*.{atn,mlp}.{gate_up,dwn}"}).errors(), HasSubstr("2 errors"));
  for (const char* const pattern : {"layers.*.{attn,mlp}.{qkv,out,gate_up,down}", "layers.{0,-12}.attn.qkv", "layers.{1,}1.attn.out"}) {
    EXPECT_EQ(assign({pattern}).errors(), "") << pattern;
  }
  EXPECT_EQ(assign({"layers.*.attn.qkv", "layers.*.attn.{qkv,out}"}).errors(), "");  // taken before is not matched by nothing
}

TEST(Rules, AnAlternativeWithALiteralEndReachesWhatItNames) {
  EXPECT_THAT(assign({"{embed,layers.0.attn.qkv}"}).matched(), ElementsAre("embed", "layers.0.attn.qkv"));
  EXPECT_THAT(assign({"layers.3.{attn.q*,mlp_norm}"}).matched(), ElementsAre("layers.3.mlp_norm", "layers.3.attn.qkv"));
}

TEST(Rules, ABranchOfARegularExpressionIsNoLiteralEnd) {
  EXPECT_EQ(assign({"re:.*|x\\.norm"}).rule_of("embed"), -1);
  EXPECT_EQ(assign({"re:.*|x\\.norm"}).rule_of("layers.0.attn_norm"), -1);
  EXPECT_THAT(assign({"re:layers\\.(3|5)\\.moe\\.router"}).errors(), HasSubstr("write out the last segment, without |"));
  EXPECT_EQ(assign({"re:layers\\.3\\.(?!\\|)moe\\.router"}).rule_of("layers.3.moe.router"), 0);
}

TEST(Rules, ARuleThatOnlyPassesOverSaysHowToReachThem) {
  for (const char* const pattern : {"*norm", "layers.*.attn.q_*", "re:.*router", "em*"}) {
    EXPECT_THAT(assign({pattern}).errors(), HasSubstr("write out the last segment")) << pattern;
  }
}

TEST(Rules, ARuleThatNamesTheOutputProjectionPointsToItsSwitch) {
  for (const char* const pattern :
       {"output", "out*", "{embed,output}", "{output,layers.*.attn.qkv}", "{*,output}", "{out*,layers.*}", "re:output", "re:out.*",
        "o?tput", "re:output|layers\\..*qkv", "re:(embed|output|layers\\.0\\.attn\\.qkv)"}) {
    EXPECT_THAT(assign({pattern}).errors(), HasSubstr("to which rules do not apply: use precision.fp8_output_proj")) << pattern;
  }
  for (const char* const pattern : {"*", "re:.*", "*{out,down}*", "re:layers.*"}) EXPECT_EQ(assign({pattern}).errors(), "") << pattern;
  Assigned tied;
  tied.modules.pop_back();
  assign_rules({{.match = "output", .recipe = "high"}}, tied.modules, tied.report);
  EXPECT_THAT(tied.errors(), HasSubstr("precision.fp8_output_proj"));
}

TEST(Rules, ARuleBehindOthersThatTakeAllItsModulesIsAnError) {
  EXPECT_THAT(assign({"layers.*", "layers.*.mlp.*"}).errors(),
              HasSubstr("precision.rules.1.match: \"layers.*.mlp.*\" can never be reached: all its modules are taken by precision.rules.0 "
                        "\"layers.*\" before it"));
  EXPECT_THAT(assign({"*.mlp.gate_up", "*.mlp.down", "layers.*.mlp.*"}).errors(),
              HasSubstr("taken by precision.rules.0 \"*.mlp.gate_up\", precision.rules.1 \"*.mlp.down\" before it"));
  EXPECT_THAT(assign({"embed", "embed"}).errors(), HasSubstr("precision.rules.1.match"));
  EXPECT_EQ(assign({"*.mlp.gate_up", "layers.*.mlp.*"}).errors(), "");
}

TEST(Rules, AllThatIsWrongIsReported) {
  const std::string errors = assign({"a{", "layers.*.mlp.*", "nothing", "re:("}).errors();
  EXPECT_THAT(errors, HasSubstr("3 errors"));
  EXPECT_THAT(errors, Not(HasSubstr("precision.rules.1")));
}

}  // namespace mantissa::precision_rules_test
