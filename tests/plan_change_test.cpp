// A resume under another recipe: a change of any single thing that a recipe says of its operands is found and named.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "files.h"
#include "mantissa/train/config.h"
#include "mantissa/train/precision_setup.h"

namespace mantissa {
namespace {

using ::testing::HasSubstr;

// A run whose recipe "own" is this, in a model of one layer.
RunConfig run_with(const std::string& own) {
  return load_run_config({.file = "run.json",
                          .text = R"({"data": {"path": "x", "tokenizer": "byte"}, "precision": {"recipe": "own"},
                                      "model": {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 128}})",
                          .sets = {"precision.recipes.own=" + own}},
                         Inputs::unchecked)
      .config;
}

// "qkv: own (...)" of the first change; "" if a resume is taken as one under the same recipe.
std::string change(const std::string& before, const std::string& now) {
  try {
    allowed_plan_changes(resolve_plan(run_with(before)).to_json().dump(), resolve_plan(run_with(now)), "manifest.json", LoadFor::resume);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    const std::string message = error.what();
    const size_t at = message.find("attn.qkv: ");
    return at == std::string::npos ? message : message.substr(at, message.find('\n', at) - at);
  }
}

// An operand's quantisation as it stands in a config and, with sorted keys, in a message.
std::string how(const char* block, const char* format, const char* rule) {
  return text(R"({"block":)", block, R"(,"format":")", format, R"(","rule":")", rule, "\"}");
}

// A recipe that quantises this one operand, and what changes in it.
struct Operand {
  std::string key, gemms;
  std::string format, other_format, rule, other_rule, block, other_block;
};

TEST(PlanChange, EveryPartOfEveryOperandCounts) {
  const Operand operands[] = {
      {"weight", R"(["fprop","dgrad"])", "e4m3", "e5m2", "rceil", "floor", "[32,32]", "[1,32]"},
      {"weight", R"(["fprop","dgrad"])", "e4m3", "e5m2", "rceil", "floor", "[1,32]", "[1,128]"},
      {"input", R"(["fprop","wgrad"])", "e4m3", "e5m2", "rceil", "floor", "[1,32]", "[1,128]"},
      {"output_grad", R"(["dgrad","wgrad"])", "e4m3", "e5m2", "rceil", "floor", "[1,32]", "[1,128]"},
      {"weight_fake_quant", "[]", "e2m1", "e4m3", "rceil", "floor", "[1,32]", "[1,16]"},
  };
  for (const Operand& o : operands) {
    const auto recipe = [&](const std::string& quantisation) {
      return text(R"({"base":"high","gemms":)", o.gemms, ",\"", o.key, "\":", quantisation, '}');
    };
    const std::string before = how(o.block.c_str(), o.format.c_str(), o.rule.c_str());
    EXPECT_EQ(change(recipe(before), recipe(before)), "");
    for (const std::string& now :
         {how(o.other_block.c_str(), o.format.c_str(), o.rule.c_str()), how(o.block.c_str(), o.other_format.c_str(), o.rule.c_str()),
          how(o.block.c_str(), o.format.c_str(), o.other_rule.c_str())}) {
      EXPECT_EQ(change(recipe(before), recipe(now)), "attn.qkv: own (" + o.key + ' ' + before + " -> " + now + ")");
    }
    if (o.gemms == "[]") {
      EXPECT_EQ(change(recipe(before), recipe("null")), "attn.qkv: own (" + o.key + ' ' + before + " -> null)");
    }
  }
}

TEST(PlanChange, OneOperandOfSeveralIsNamedAlone) {
  const auto recipe = [](const char* changed) { return text(R"({"base":"mxfp8")", changed, '}'); };
  for (const std::string key : {"weight", "input", "output_grad"}) {
    const std::string message = change(recipe(""), recipe((",\"" + key + R"(":{"rule":"floor"})").c_str()));
    EXPECT_THAT(message, HasSubstr("own (" + key + " {"));
    for (const char* other : {"weight ", "input ", "output_grad ", "weight_fake_quant ", "gemms ", "compute "}) {
      EXPECT_TRUE(other == key + ' ' || message.find(other) == std::string::npos) << message;
    }
  }
}

TEST(PlanChange, TheGemmsThatTakeTheOperandsCount) {
  const auto recipe = [](const char* gemms) { return text(R"({"base":"mxfp8","gemms":)", gemms, '}'); };
  const std::string all = recipe(R"(["fprop","dgrad","wgrad"])");
  EXPECT_EQ(change(all, recipe(R"(["wgrad","dgrad","fprop"])")), "") << "the order does not";
  for (const char* fewer : {R"(["dgrad","wgrad"])", R"(["fprop","wgrad"])", R"(["fprop","dgrad"])"}) {
    EXPECT_THAT(change(all, recipe(fewer)), HasSubstr("own (gemms {")) << fewer;
  }
}

TEST(PlanChange, TheTypeOfOperandsThatAreNotQuantisedCounts) {
  EXPECT_THAT(change(R"({"base":"bf16"})", R"({"base":"fp32"})"), HasSubstr(R"(own (compute "bf16" -> "fp32")"));
}

}  // namespace
}  // namespace mantissa
