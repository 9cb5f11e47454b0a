// Recipes: the presets, own recipes from a config, and everything that is refused.
#include <gmock/gmock.h>

#include "files.h"
#include "mantissa/precision/config.h"

namespace mantissa::precision_recipe_test {

using test::error_of;
using ::testing::HasSubstr;
using ::testing::Not;

struct Section {
  PrecisionConfig precision;
  void fields(auto& v) { v("precision", precision, ""); }
};

struct Resolved {
  PrecisionConfig config;
  ConfigReport report;
  std::map<std::string, Recipe> recipes;
  std::string errors() const {
    return report.ok() ? "" : error_of([&] { report.throw_if_failed(); }).what();
  }
};

// One own recipe named "own".
Resolved own(const std::string& recipe, std::vector<std::string> sets = {}) {
  Resolved r;
  Section section;
  const std::string content = "{\"precision\": {\"recipes\": {\"own\":\n" + recipe + "}}}";
  read_config({.file = "c.json", .text = content, .sets = std::move(sets)}, fields_of(section), r.report);
  complete_recipes(section.precision, r.report);
  r.recipes = resolve_recipes(section.precision, r.report);
  r.config = section.precision;
  return r;
}

const Quantization kRow{Format::e4m3, 1, 32, ScaleRule::rceil}, kTile{Format::e4m3, 32, 32, ScaleRule::rceil};
const Quantization kFp4{Format::e2m1, 1, 32, ScaleRule::flashinfer};
constexpr GemmSet kAll{.fprop = true, .dgrad = true, .wgrad = true};

TEST(Recipe, PresetsHaveTheDocumentedFormats) {
  const auto is = [](const char* name, const Recipe& expected) {
    const Recipe recipe = preset_recipe(name);
    EXPECT_EQ(recipe.compute, expected.compute) << name;
    EXPECT_EQ(recipe.weight_fake_quant, expected.weight_fake_quant) << name;
    EXPECT_EQ(recipe.weight, expected.weight) << name;
    EXPECT_EQ(recipe.input, expected.input) << name;
    EXPECT_EQ(recipe.output_grad, expected.output_grad) << name;
    EXPECT_EQ(recipe.gemms, expected.gemms) << name;
    EXPECT_EQ(recipe.columns, expected.columns) << name;
    EXPECT_EQ(recipe.backward, expected.backward) << name;
    EXPECT_TRUE(recipe_problems(recipe).empty()) << name;
  };
  is("high", {});
  is("bf16", {});
  is("fp32", {.compute = Dtype::f32});
  is("mxfp8", {.weight = kTile, .input = kRow, .output_grad = kRow, .gemms = kAll});
  is("mxfp8_te", {.weight = kRow,
                  .input = kRow,
                  .output_grad = {Format::e5m2, 1, 32, ScaleRule::rceil},
                  .gemms = kAll,
                  .columns = ColumnSource::values});
  is("mxfp8_weights", {.weight = kTile, .gemms = {.fprop = true, .dgrad = true}});
  const Quantization row128{Format::e4m3, 1, 128, ScaleRule::rceil};
  is("fp8_block", {.weight = {Format::e4m3, 128, 128, ScaleRule::rceil}, .input = row128, .output_grad = row128, .gemms = kAll});
  is("mxfp4_qat", {.weight_fake_quant = kFp4});
  is("mxfp4_qat_mxfp8_act", {.weight_fake_quant = kFp4, .input = kRow, .output_grad = kRow, .gemms = kAll});
  is("mxfp4_qat_mxfp4_act",
     {.weight_fake_quant = kFp4, .input = kFp4, .gemms = {.fprop = true}, .backward = BackwardOperands::dequantized});
  const Quantization weight{Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -8}, input{Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -2};
  is("nvfp4_qat", {.weight_fake_quant = weight});
  is("nvfp4_qat_nvfp4_act",
     {.weight_fake_quant = weight, .input = input, .gemms = {.fprop = true}, .backward = BackwardOperands::dequantized});
  EXPECT_EQ(preset_names().size(), 12u);
  RecipeConfig config;
  EXPECT_EQ(fields_of(config).front().description, "preset that the other keys change: " + joined(preset_names()));
}

TEST(Recipe, HighTakesTheDtypeOfTheConfigAndTheNamedTypesDoNot) {
  EXPECT_EQ(preset_recipe("high", Dtype::f32).compute, Dtype::f32);
  EXPECT_EQ(preset_recipe("mxfp8", Dtype::f32).compute, Dtype::f32);
  EXPECT_EQ(preset_recipe("bf16", Dtype::f32).compute, Dtype::bf16);
  EXPECT_EQ(preset_recipe("fp32", Dtype::bf16).compute, Dtype::f32);
}

TEST(Recipe, AnOwnRecipeChangesItsBase) {
  const Resolved r =
      own(R"({"base": "mxfp8", "weight": {"block": [1, 32]}, "input": null, "compute": "fp32", "gemms": ["fprop", "dgrad"]})");
  ASSERT_EQ(r.errors(), "");
  const Recipe& recipe = r.recipes.at("own");
  EXPECT_EQ(recipe.weight, kRow);
  EXPECT_EQ(recipe.input, Quantization{});
  EXPECT_EQ(recipe.output_grad, kRow);
  EXPECT_EQ(recipe.compute, Dtype::f32);
  EXPECT_EQ(recipe.gemms, (GemmSet{.fprop = true, .dgrad = true}));
  EXPECT_EQ(r.report.origin("precision.recipes.own.output_grad"), "derived");
}

TEST(Recipe, ABackwardOfValuesDropsWhatTheBaseQuantizesThere) {
  for (const auto& [name, backward] :
       {std::pair{"dequantized", BackwardOperands::dequantized}, {"high_precision", BackwardOperands::high_precision}}) {
    const Resolved r = own(text(R"({"base": "mxfp4_qat_mxfp8_act", "backward": ")", name, R"("})"));
    ASSERT_EQ(r.errors(), "") << name;
    const Recipe& recipe = r.recipes.at("own");
    EXPECT_EQ(recipe.gemms, (GemmSet{.fprop = true}));
    EXPECT_EQ(recipe.output_grad, Quantization{});
    EXPECT_EQ(recipe.input, kRow);
    EXPECT_EQ(recipe.weight_fake_quant, kFp4);
    EXPECT_EQ(recipe.backward, backward);
  }
}

TEST(Recipe, ABackwardOfValuesRefusesWhatItWouldNotRead) {
  const auto errors = [](const std::string& members) { return own("{" + members + "}").errors(); };
  EXPECT_THAT(errors(R"("base": "mxfp8", "backward": "dequantized", "gemms": ["fprop", "wgrad"])"),
              HasSubstr("own.gemms: must not list dgrad or wgrad beside backward dequantized"));
  EXPECT_THAT(errors(R"("base": "mxfp8", "backward": "dequantized", "output_grad": {"format": "e5m2"})"),
              HasSubstr("own.output_grad: must be null beside backward dequantized"));
  EXPECT_THAT(errors(R"("base": "mxfp8", "gemms": [], "weight": null, "input": null, "backward": "high_precision")"),
              HasSubstr("own.backward: high_precision has no effect"));
  EXPECT_THAT(errors(R"("base": "mxfp4_qat", "backward": "dequantized")"), HasSubstr("own.backward: dequantized has no effect"));
  for (const char* const operand : {"weight", "input"})
    EXPECT_THAT(errors(text(R"("base": "mxfp8", ")", operand, R"(": null, "backward": "dequantized", "simulate": {")", operand,
                            R"(": {"format": "e2m1"}})")),
                HasSubstr("own.backward: dequantized needs codes, but fprop also multiplies simulated operands"));
  EXPECT_THAT(errors(R"("base": "mxfp8", "backward": "high_precision", "simulate": {"output_grad": {"format": "e5m2"}})"),
              HasSubstr("own.simulate.output_grad: must be null beside backward high_precision"));
  EXPECT_EQ(errors(R"("base": "mxfp4_qat", "backward": "high_precision")"), "");
  EXPECT_EQ(errors(R"("base": "mxfp8_weights", "backward": "dequantized")"), "");
}

TEST(Recipe, CodesAloneInForwardAreOneRecipeByEitherKey) {
  const Recipe by_gemms = own(R"({"base": "mxfp8", "gemms": ["fprop"], "output_grad": null})").recipes.at("own");
  const Recipe by_backward = own(R"({"base": "mxfp8", "backward": "high_precision"})").recipes.at("own");
  EXPECT_EQ(by_backward.gemms, by_gemms.gemms);
  EXPECT_EQ(by_backward.output_grad, by_gemms.output_grad);
  EXPECT_EQ(by_backward.backward, by_gemms.backward);
}

TEST(Recipe, ColumnsAreThoseOfTheBaseUnlessTheyAreGiven) {
  const auto columns = [](const std::string& recipe) { return own(recipe).recipes.at("own").columns; };
  EXPECT_EQ(columns(R"({"base": "mxfp8_te"})"), ColumnSource::values);
  EXPECT_EQ(columns(R"({"base": "mxfp8_te", "columns": "rows"})"), ColumnSource::rows);
  EXPECT_EQ(columns(R"({"base": "mxfp8"})"), ColumnSource::rows);
  for (const char* const none : {R"("backward": "dequantized")", R"("backward": "high_precision")", R"("gemms": ["fprop"])"})
    EXPECT_EQ(columns(text(R"({"base": "mxfp8_te", )", none, "}")), ColumnSource::rows) << "there are no columns: " << none;
}

TEST(Recipe, ColumnsOfValuesNeedOperandsAlongColumns) {
  const auto errors = [](const std::string& members) { return own(R"({"columns": "values", )" + members + "}").errors(); };
  for (const char* const base : {"mxfp8", "mxfp8_te", "fp8_block", "mxfp4_qat_mxfp8_act"})
    EXPECT_EQ(errors(text(R"("base": ")", base, '"')), "");
  EXPECT_EQ(errors(R"("base": "mxfp8_weights", "weight": {"block": [1, 32]})"), "");
  for (const char* const members :
       {R"("base": "mxfp8_weights")", R"("base": "high")", R"("base": "mxfp4_qat")", R"("base": "mxfp8", "gemms": ["fprop", "dgrad"])",
        R"("base": "mxfp8", "gemms": ["wgrad"])", R"("base": "mxfp8", "backward": "dequantized")"}) {
    EXPECT_THAT(errors(members), HasSubstr("own.columns: has no effect")) << members;
  }
}

TEST(Recipe, WithoutABaseEverythingIsHighPrecision) {
  const Resolved r = own(R"({"weight_fake_quant": {"format": "e4m3", "block": [1, 6]}})");
  ASSERT_EQ(r.errors(), "");
  EXPECT_EQ(r.recipes.at("own").weight_fake_quant, (Quantization{Format::e4m3, 1, 6, ScaleRule::rceil}));
  EXPECT_FALSE(r.recipes.at("own").gemms.any());
}

TEST(Recipe, AFakeQuantizationInE2m1WithoutARuleIsFlashinfer) {
  const auto rule = [](const std::string& recipe) {
    const Resolved r = own(recipe);
    EXPECT_EQ(r.errors(), "") << recipe;
    return r.recipes.at("own").weight_fake_quant.rule;
  };
  EXPECT_EQ(rule(R"({"weight_fake_quant": {"format": "e2m1"}})"), ScaleRule::flashinfer);
  EXPECT_EQ(rule(R"({"base": "mxfp8", "weight": null, "weight_fake_quant": {"format": "e2m1", "block": [1, 16]}})"), ScaleRule::flashinfer);
  EXPECT_EQ(rule(R"({"weight_fake_quant": {"format": "e2m1", "rule": "rceil"}})"), ScaleRule::rceil);
  EXPECT_EQ(rule(R"({"weight_fake_quant": {"format": "e4m3"}})"), ScaleRule::rceil);
  EXPECT_EQ(rule(R"({"base": "mxfp4_qat", "weight_fake_quant": {"format": "e2m1", "rule": "floor"}})"), ScaleRule::floor);
  const Resolved input = own(R"({"input": {"format": "e2m1"}, "gemms": ["fprop"]})");
  ASSERT_EQ(input.errors(), "");
  EXPECT_EQ(input.recipes.at("own").input, kFp4);
}

TEST(Recipe, MseIsForEveryOperandThatIsStoredAsCodes) {
  const Resolved r = own(R"({"base": "mxfp8", "weight": {"rule": "mse"}, "input": {"rule": "mse"}, "output_grad": {"rule": "mse"}})");
  ASSERT_EQ(r.errors(), "");
  const Recipe& recipe = r.recipes.at("own");
  for (const Quantization& how : {recipe.weight, recipe.input, recipe.output_grad}) EXPECT_EQ(how.rule, ScaleRule::mse);
  const Resolved qat = own(R"({"base": "mxfp4_qat", "weight_fake_quant": {"rule": "mse", "scale_range": [-20, 127]}})");
  ASSERT_EQ(qat.errors(), "");
  EXPECT_EQ(qat.recipes.at("own").weight_fake_quant, (Quantization{Format::e2m1, 1, 32, ScaleRule::mse, {107, 254}}));
}

TEST(Recipe, TheCommandLineChangesOneMemberOfAQuantization) {
  const Resolved r =
      own(R"({"base": "mxfp8"})", {"precision.recipes.own.weight={\"block\": [1, 32]}", "precision.recipes.own.input.rule=floor"});
  ASSERT_EQ(r.errors(), "");
  EXPECT_EQ(r.recipes.at("own").weight, kRow);
  EXPECT_EQ(r.recipes.at("own").input, (Quantization{Format::e4m3, 1, 32, ScaleRule::floor}));
}

TEST(Recipe, ARangeOfScalesIsGivenByExponents) {
  const Resolved r = own(R"({"base": "mxfp8", "input": {"scale_range": [-22, 127]}, "output_grad": {"scale_range": [-126, 125]}})");
  ASSERT_EQ(r.errors(), "");
  EXPECT_EQ(r.recipes.at("own").input, (Quantization{Format::e4m3, 1, 32, ScaleRule::rceil, {105, 254}}));
  EXPECT_EQ(r.recipes.at("own").output_grad.range, (ScaleRange{1, 252}));
  EXPECT_EQ(r.recipes.at("own").weight.range, ScaleRange{});
  for (const char* range : {"[1, 127]", "[-128, 127]", "[-127, -1]", "[-127, 128]", "[0]", "[]", "[0, 0, 0]"}) {
    const Resolved wrong = own(text(R"({"base": "mxfp8", "input": {"scale_range": )", range, "}}"));
    EXPECT_THAT(wrong.errors(), HasSubstr("input.scale_range")) << range;
    EXPECT_THAT(wrong.errors(), HasSubstr("exponents from -127 to 0 and from 0 to 127")) << range;
  }
  const Resolved flashinfer = own(R"({"base": "mxfp4_qat", "weight_fake_quant": {"scale_range": [-126, 127]}})");
  EXPECT_THAT(flashinfer.errors(), HasSubstr("weight_fake_quant.scale_range: must be [-127, 127]"));
}

TEST(Recipe, Nvfp4HasItsFormWhateverTheBaseHas) {
  const Quantization weight{Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -8}, input{Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -2};
  EXPECT_EQ(own(R"({"base": "mxfp4_qat", "weight_fake_quant": {"format": "nvfp4"}})").recipes.at("own").weight_fake_quant, weight);
  EXPECT_EQ(own(R"({"base": "nvfp4_qat", "weight_fake_quant": {"format": "e2m1"}})").recipes.at("own").weight_fake_quant,
            (Quantization{Format::e2m1, 1, 32, ScaleRule::flashinfer}));
  const Resolved both = own(R"({"base": "mxfp4_qat_mxfp4_act", "weight_fake_quant": {"format": "nvfp4", "tensor_exponent": -6},
                                "input": {"format": "nvfp4"}})");
  ASSERT_EQ(both.errors(), "");
  EXPECT_EQ(both.recipes.at("own").weight_fake_quant, (Quantization{Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -6}));
  EXPECT_EQ(both.recipes.at("own").input, input);
}

TEST(Recipe, WhatNvfp4HasNotAndWhatIsItsAloneIsRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"base": "mxfp4_qat", "weight_fake_quant": {"format": "nvfp4", "rule": "rceil"}})",
       "precision.recipes.own.weight_fake_quant.rule: must be nearest or mse for nvfp4"},
      {R"({"base": "nvfp4_qat", "weight_fake_quant": {"block": [1, 32]}})",
       "precision.recipes.own.weight_fake_quant.block: must be [1, 16], as nvfp4 has them, got [1, 32]"},
      {R"({"base": "nvfp4_qat", "weight_fake_quant": {"scale_range": [-9, 8]}})",
       "precision.recipes.own.weight_fake_quant.scale_range: is not of nvfp4: set tensor_exponent"},
      {R"({"base": "nvfp4_qat", "weight_fake_quant": {"tensor_exponent": 61}})",
       "precision.recipes.own.weight_fake_quant.tensor_exponent: must be from -60 to 60"},
      {R"({"base": "nvfp4_qat", "weight_fake_quant": {"tensor_exponent": -9223372036854775808}})",
       "precision.recipes.own.weight_fake_quant.tensor_exponent: must be from -60 to 60"},
      {R"({"base": "high", "gemms": ["fprop"], "simulate": {"weight": {"format": "e2m1", "rule": "nearest"}}})",
       "precision.recipes.own.simulate.weight.rule: must be rceil, floor, even or ceil"},
      {R"({"base": "mxfp4_qat", "weight_fake_quant": {"tensor_exponent": -8}})",
       "precision.recipes.own.weight_fake_quant.tensor_exponent: is of nvfp4 only, and the format is e2m1: remove it"},
      {R"({"base": "mxfp8", "input": {"rule": "nearest"}})",
       "precision.recipes.own.input.rule: must not be nearest: that is the rule of nvfp4"},
      {R"({"base": "mxfp8", "weight": {"format": "nvfp4"}})",
       "precision.recipes.own.weight.format: must be e4m3 or e5m2: nvfp4 is for weight_fake_quant and input only"},
      {R"({"base": "mxfp8", "input": {"format": "nvfp4"}, "gemms": ["fprop", "dgrad"]})",
       "precision.recipes.own.input.block: has blocks of 16 beside blocks of 32"},
  };
  for (const auto& [recipe, error] : cases) EXPECT_THAT(own(recipe).errors(), HasSubstr(error)) << recipe;
}

TEST(Recipe, WhatIsCompleteStaysAsItIs) {
  Resolved r = own(R"({"base": "mxfp8", "weight": null, "gemms": ["wgrad"]})");
  const std::string written = effective_config(r.config);
  const PrecisionConfig again = config_from_json<PrecisionConfig>(written, "written", ExitCode::internal);
  EXPECT_EQ(effective_config(again), written);
  ConfigReport report;
  EXPECT_EQ(resolve_recipes(again, report).at("own").weight, Quantization{});
  EXPECT_EQ(resolve_recipes(again, report).at("own").input, kRow);
}

TEST(Recipe, WhatCannotBeIsRefusedWithItsKeyAndPlace) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"base": "mxfp9"})", "precision.recipes.own.base: no preset \"mxfp9\"; did you mean 'mxfp8'? (there are high, bf16, "},
      {R"({"base": "own"})", "precision.recipes.own.base: no preset \"own\""},
      {R"({"weight": {"block": [1, 32]}, "gemms": ["fprop"]})", "precision.recipes.own.weight.format: is missing"},
      {R"({"weight": {"format": null}, "gemms": ["fprop"]})", "precision.recipes.own.weight.format: is missing"},
      {R"({"weight": {"format": "e3m4"}})",
       "precision.recipes.own.weight.format: must be one of e4m3, e5m2, e2m1, nvfp4 or null, got \"e3m4\""},
      {R"({"weight": {"formt": "e4m3"}})", "precision.recipes.own.weight.formt: unknown key; did you mean 'format'?"},
      {R"({"weights": null})", "precision.recipes.own.weights: unknown key; did you mean 'weight'?"},
      {R"({"base": "mxfp8", "weight": {"format": "e2m1"}})",
       "precision.recipes.own.weight.format: must be e4m3 or e5m2: e2m1 is for weight_fake_quant and input"},
      {R"({"base": "mxfp8", "input": {"format": "e2m1"}})",
       "precision.recipes.own.gemms: must not list wgrad beside an input in four bits, which has no codes along tokens: take backward "
       "dequantized"},
      {R"({"base": "mxfp8", "output_grad": {"format": "e2m1"}})", "precision.recipes.own.output_grad.format: must be e4m3 or e5m2"},
      {R"({"base": "mxfp4_qat_mxfp4_act", "input": {"format": "e4m3"}})",
       "precision.recipes.own.input.rule: must be rceil, floor, even, ceil or mse: flashinfer is for weight_fake_quant and input in e2m1"},
      {R"({"base": "mxfp4_qat_mxfp4_act", "input": {"block": [1, 16]}})", "precision.recipes.own.input.block: must be [1, b] with b = 32"},
      {R"({"base": "mxfp8", "input": {"rule": "flashinfer"}})",
       "precision.recipes.own.input.rule: must be rceil, floor, even, ceil or mse"},
      {R"({"base": "mxfp8", "weight": {"block": [1, 64]}})",
       "precision.recipes.own.weight.block: must be [1, b] or [b, b] with b = 32 or 128, got [1, 64]"},
      {R"({"base": "mxfp8", "weight": {"block": [32, 1]}})", "precision.recipes.own.weight.block: must be [1, b] or [b, b]"},
      {R"({"base": "mxfp8", "weight": {"block": [128, 32]}})", "precision.recipes.own.weight.block: must be [1, b] or [b, b]"},
      {R"({"base": "mxfp8", "input": {"block": [32, 32]}})",
       "precision.recipes.own.input.block: must be [1, b] with b = 32 or 128, got [32, 32]"},
      {R"({"base": "mxfp8", "input": {"block": [1, -32]}})", "precision.recipes.own.input.block: must be [1, b]"},
      {R"({"base": "mxfp8", "input": {"block": []}})", "precision.recipes.own.input.block: must be [rows, columns], got a list of 0"},
      {R"({"base": "mxfp8", "input": {"block": [1, 32, 1]}})",
       "precision.recipes.own.input.block: must be [rows, columns], got a list of 3"},
      {R"({"base": "mxfp8", "input": {"block": 32}})", "precision.recipes.own.input.block: must be a list, got 32"},
      {R"({"base": "mxfp8", "input": {"block": [1, 1.5]}})", "precision.recipes.own.input.block.1: must be an integer, got 1.5"},
      {R"({"base": "mxfp8", "output_grad": {"block": [1, 128]}})",
       "precision.recipes.own.output_grad.block: has blocks of 128 beside blocks of 32"},
      {R"({"base": "mxfp8", "weight_fake_quant": {"format": "e2m1"}})", "precision.recipes.own.weight_fake_quant: excludes weight"},
      {R"({"base": "mxfp4_qat", "weight": {"format": "e4m3"}, "gemms": ["fprop"]})",
       "precision.recipes.own.weight_fake_quant: excludes weight"},
      {R"({"base": "mxfp4_qat", "weight_fake_quant": {"block": [32, 32]}})",
       "precision.recipes.own.weight_fake_quant.block: must be [1, n] with an even n, got [32, 32]"},
      {R"({"base": "mxfp4_qat", "weight_fake_quant": {"block": [1, 0]}})", "precision.recipes.own.weight_fake_quant.block: must be [1, n]"},
      {R"({"base": "mxfp4_qat", "weight_fake_quant": {"format": "e4m3"}})",
       "precision.recipes.own.weight_fake_quant.rule: flashinfer is for e2m1 only"},
      {R"({"base": "mxfp8", "gemms": []})",
       "precision.recipes.own.gemms: is empty, so nothing would read the quantized weight, input, output_grad"},
      {R"({"base": "mxfp4_qat", "gemms": ["fprop"]})", "precision.recipes.own.gemms: must be empty"},
      {R"({"base": "mxfp8", "gemms": ["fprop", "fprop"]})", "precision.recipes.own.gemms: lists fprop twice"},
      {R"({"base": "mxfp8", "gemms": ["forward"]})", "precision.recipes.own.gemms.0: must be one of fprop, dgrad, wgrad"},
      {R"({"base": "mxfp8", "gemms": "fprop"})", "precision.recipes.own.gemms: must be a list"},
      {R"({"compute": "fp16"})", "precision.recipes.own.compute: must be one of fp32, bf16 or null"},
      {R"(null)", "precision.recipes.own: must be an object, got null"},
  };
  for (const auto& [recipe, message] : cases) {
    const Resolved r = own(recipe);
    EXPECT_THAT(r.errors(), HasSubstr(message)) << recipe;
    EXPECT_THAT(r.errors(), HasSubstr("(c.json:")) << recipe;
    EXPECT_THAT(r.errors(), Not(HasSubstr("errors in the configuration"))) << recipe;
    EXPECT_EQ(r.recipes.count("own"), r.report.ok() ? 1u : 0u) << recipe;
  }
}

TEST(Recipe, AllThatIsWrongWithARecipeComesAtOnce) {
  const std::string errors = own(R"({"base": "mxfp8", "weight": {"format": "e2m1", "rule": "flashinfer", "block": [2, 32]},
    "input": {"block": [1, 16]}, "gemms": []})")
                                 .errors();
  EXPECT_THAT(errors, HasSubstr("5 errors"));
}

TEST(Recipe, ANameOfAPresetIsTaken) {
  const Resolved r = own("{}", {"precision.recipes={\"mxfp8\": {}}"});
  EXPECT_THAT(r.errors(), HasSubstr("precision.recipes.mxfp8: is the name of a preset"));
  EXPECT_EQ(r.recipes.at("mxfp8").weight, kTile);
}

}  // namespace mantissa::precision_recipe_test
