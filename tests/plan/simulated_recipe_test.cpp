// Recipes with simulated operands: their form in a config, the operands that each GEMM gets, and everything that is refused.
#include <gmock/gmock.h>

#include "files.h"
#include "mantissa/config/run_config.h"
#include "mantissa/precision/plan.h"
#include "models/model_shape.h"
#include "testing.h"

namespace mantissa::simulated_recipe_test {

using test::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr GemmSet kAll{.fprop = true, .dgrad = true, .wgrad = true};
constexpr const char* kNvfp4 = R"("simulate": {"weight": {"format": "e2m1", "block": [16, 16], "scale": "e4m3"},
  "input": {"format": "e2m1", "block": [1, 16], "scale": "e4m3"},
  "output_grad": {"format": "e2m1", "block": [1, 16], "scale": "e4m3", "rounding": "stochastic"},
  "hadamard": 16, "hadamard_gemms": ["wgrad"]}, "gemms": ["fprop", "dgrad", "wgrad"])";

struct Planned {
  PrecisionConfig config;
  PrecisionPlan plan{Dtype::f32, {}};
  ConfigReport report;
  std::string errors() const {
    return report.ok() ? "" : error_of([&] { report.throw_if_failed(); }).what();
  }
  const Recipe& recipe(const std::string& path = "layers.0.mlp.down") const { return plan.of(path).recipe; }
};

ModelConfig small_model() {
  ModelConfig model;
  model.vocab_size = 64;
  model.hidden_size = 64;
  model.num_layers = 2;
  model.num_attention_heads = 2;
  model.intermediate_size = 96;
  model.max_position_embeddings = 16;
  return model;
}

struct Section {
  PrecisionConfig precision;
  void fields(auto& v) { v("precision", precision, ""); }
};

// The members of an own recipe, which is the ambient one.
Planned own(const std::string& members, const ModelConfig& model = small_model(), int64_t tensor = 1, const std::string& more = "") {
  Planned p;
  Section section;
  const std::string content = R"({"precision": {"recipe": "own")" + more + R"(, "recipes": {"own": {)" + members + "}}}}";
  read_config({.file = "c.json", .text = content}, fields_of(section), p.report);
  complete_recipes(section.precision, p.report);
  p.config = section.precision;
  p.plan = PrecisionPlan::resolve(p.config, model_shape(model, tensor), p.report);
  return p;
}

TEST(SimulatedRecipe, Nvfp4HasTheOperandsOfItsPaper) {
  const Planned p = own(kNvfp4);
  ASSERT_EQ(p.errors(), "");
  EXPECT_EQ(gemm_text(p.recipe(), GemmRole::fprop), "bf16 of e2m1 1x16 e4m3 * bf16 of e2m1 16x16 e4m3");
  EXPECT_EQ(gemm_text(p.recipe(), GemmRole::dgrad), "bf16 of e2m1 1x16 e4m3 stochastic * bf16 of e2m1 16x16 e4m3");
  EXPECT_EQ(gemm_text(p.recipe(), GemmRole::wgrad), "bf16 of e2m1 16x1 e4m3 stochastic hadamard 16 * bf16 of e2m1 16x1 e4m3 hadamard 16");
}

TEST(SimulatedRecipe, BlocksAndTransformsRunAlongTheContractionOfEachGemm) {
  const Simulation rows{.element = {3, 2}, .block_cols = 8};
  const Recipe recipe{.simulated = {.weight = rows, .input = rows, .output_grad = rows, .hadamard = 32, .hadamard_gemms = kAll},
                      .gemms = kAll};
  const auto is = [](const OperandChoice& choice, int64_t block_rows, int64_t block_cols, int contraction) {
    EXPECT_EQ(choice.source, OperandSource::simulated);
    EXPECT_FALSE(choice.is_codes());
    EXPECT_EQ(choice.simulation.block_rows, block_rows);
    EXPECT_EQ(choice.simulation.block_cols, block_cols);
    EXPECT_EQ(choice.simulation.contraction, contraction);
    EXPECT_EQ(choice.simulation.hadamard, 32);
  };
  is(choose_operands(recipe, GemmRole::fprop).first, 1, 8, 1);
  is(choose_operands(recipe, GemmRole::fprop).second, 1, 8, 1);
  is(choose_operands(recipe, GemmRole::dgrad).first, 1, 8, 1);
  is(choose_operands(recipe, GemmRole::dgrad).second, 8, 1, 0);
  is(choose_operands(recipe, GemmRole::wgrad).first, 8, 1, 0);
  is(choose_operands(recipe, GemmRole::wgrad).second, 8, 1, 0);
}

TEST(SimulatedRecipe, WhatIsLeftOutIsAPowerOfTwoByRceilToNearestAndCodesStandBeside) {
  const Planned p = own(R"("simulate": {"weight": {"format": "e3m2"}}, "gemms": ["fprop"])");
  ASSERT_EQ(p.errors(), "");
  EXPECT_EQ(p.recipe().simulated.weight, (Simulation{.element = {3, 2}, .block_rows = 1, .block_cols = 32}));
  EXPECT_EQ(gemm_text(p.recipe(), GemmRole::fprop), "bf16 * bf16 of e3m2 1x32 rceil");
  EXPECT_EQ(gemm_text(p.recipe(), GemmRole::dgrad), "bf16 * bf16");
  ModelConfig model = small_model();
  model.hidden_size = model.intermediate_size = 96;
  const Planned beside =
      own(R"("base": "mxfp8", "input": null, "simulate": {"input": {"format": "e2m3", "block": [1, 48], "rule": "even"}})", model);
  ASSERT_EQ(beside.errors(), "");
  EXPECT_EQ(gemm_text(beside.recipe(), GemmRole::fprop), "bf16 of e2m3 1x48 even * e4m3 32x32");
}

TEST(SimulatedRecipe, IsPartOfThePlanAndItsHashWhileWeightsAreStoredInHighPrecision) {
  const Planned nvfp4 = own(kNvfp4), high = own("");
  std::string other = kNvfp4;
  other.replace(other.find("stochastic"), 10, "nearest");
  const ModulePrecision& entry = nvfp4.plan.of("layers.0.mlp.down");
  EXPECT_EQ(std::tuple(entry.storage, entry.wire, entry.exported), std::tuple(StoredType::bf16, StoredType::bf16, StoredType::bf16));
  EXPECT_EQ(entry.bytes, 2 * entry.module.weight_elements());
  EXPECT_FALSE(entry.resident_codes());
  EXPECT_NE(nvfp4.plan.hash(), high.plan.hash());
  EXPECT_NE(nvfp4.plan.hash(), own(other).plan.hash());
  const std::string json = nvfp4.plan.to_json().dump();
  EXPECT_THAT(json, HasSubstr(R"("output_grad":{"block":[1,16],"format":"e2m1","rounding":"stochastic","scale":"e4m3"})"));
  EXPECT_THAT(json, HasSubstr(R"("hadamard":16,"hadamard_gemms":["wgrad"])"));
  EXPECT_THAT(high.plan.to_json().dump(), Not(HasSubstr("simulate")));
}

TEST(SimulatedRecipe, NeedsACpuByTheKeyOfItsRule) {
  const std::optional<RecipeProblem> problem = own(kNvfp4).plan.needs_cpu();
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->key, "precision.recipe");
  EXPECT_THAT(problem->message, HasSubstr("recipe \"own\" of layers.0.attn.qkv simulates formats, which only the CPU backend supports"));
  EXPECT_FALSE(own("").plan.needs_cpu());
}

TEST(SimulatedRecipe, OperandsThatNoGemmReadsAreToldOf) {
  const Planned p = own(R"("simulate": {"output_grad": {"format": "e2m1"}}, "gemms": ["fprop", "wgrad"])");
  ASSERT_EQ(p.errors(), "");
  EXPECT_THAT(p.plan.warnings(), ::testing::ElementsAre("recipe \"own\" lists fprop, which has no quantized or simulated operand"));
  EXPECT_THAT(own(R"("simulate": {"input": {"format": "e2m1"}}, "gemms": ["dgrad"])").plan.warnings(),
              ::testing::ElementsAre("recipe \"own\" simulates input, which none of its gemms reads",
                                     "recipe \"own\" lists dgrad, which has no quantized or simulated operand"));
  EXPECT_THAT(own(kNvfp4).plan.warnings(), IsEmpty());
}

TEST(SimulatedRecipe, WhatCannotBeIsRefusedWithItsKey) {
  const std::string all = R"(, "gemms": ["fprop", "dgrad", "wgrad"])";
  const std::pair<std::string, const char*> cases[] = {
      {R"("simulate": {"weight": {"block": [1, 16]}})" + all,
       "simulate.weight.format: must be eXmY with X from 1 to 7 and Y from 0 to 7, got \"\""},
      {R"("simulate": {"input": {"format": "e3m2", "block": [16]}})" + all,
       "simulate.input.block: must be [rows, columns], got a list of 1"},
      {R"("simulate": {"input": {"format": "e3m2", "block": [0, 16]}})" + all, "simulate.input.block: must be [1, n] or [rows, columns]"},
      {R"("simulate": {"input": {"format": "e3m2", "block": [1, 65537]}})" + all,
       "simulate.input.block: must be [1, n] or [rows, columns]"},
      {R"("simulate": {"input": {"format": "e3m2", "rule": "flashinfer"}})" + all,
       "simulate.input.rule: must be rceil, floor, even or ceil"},
      {R"("simulate": {"input": {"format": "e2m1", "rule": "mse"}})" + all, "simulate.input.rule: must be rceil, floor, even or ceil"},
      {R"("simulate": {"input": {"format": "e3m2", "scale": "e4m3", "rule": "floor"}})" + all,
       "simulate.input.rule: applies to e8m0 scales only"},
      {R"("simulate": {"input": {"format": "e3m2", "scale": "e5m2"}})" + all, "simulate.input.scale: must be one of e8m0, e4m3"},
      {R"("simulate": {"input": {"format": "e3m2", "rounding": "up"}})" + all,
       "simulate.input.rounding: must be one of nearest, stochastic"},
      {R"("simulate": {})" + all, "simulate: names no operand"},
      {R"("simulate": {"weight": {"format": "e3m2"}})", "gemms: is empty, so nothing would read the quantized or simulated weight"},
      {R"("gemms": ["fprop"])", "gemms: must be empty: none of weight, input and output_grad is quantized or simulated"},
      {R"("base": "mxfp8", "simulate": {"weight": {"format": "e3m2"}})", "simulate.weight: excludes weight: make one of them null"},
      {R"("base": "mxfp8", "simulate": {"input": {"format": "e3m2"}})", "simulate.input: excludes input: make one of them null"},
      {R"("base": "mxfp8", "simulate": {"output_grad": {"format": "e3m2"}})", "simulate.output_grad: excludes output_grad"},
      {R"("base": "mxfp4_qat", "simulate": {"weight": {"format": "e3m2"}})" + all, "simulate.weight: excludes weight_fake_quant"},
      {R"("simulate": {"weight": {"format": "e3m2"}, "hadamard": 8, "hadamard_gemms": ["fprop"]})" + all,
       "simulate.hadamard: must be 16 or 32, or 0 for none, got 8"},
      {R"("simulate": {"weight": {"format": "e3m2"}, "hadamard": 16})" + all, "simulate.hadamard_gemms: is empty"},
      {R"("simulate": {"weight": {"format": "e3m2"}, "hadamard_gemms": ["fprop"]})" + all,
       "simulate.hadamard_gemms: must be empty: simulate.hadamard is 0"},
      {R"("simulate": {"weight": {"format": "e3m2"}, "hadamard": 16, "hadamard_gemms": ["fprop"]})" + all,
       "simulate.hadamard_gemms: lists fprop, of which both operands must be simulated"},
      {R"("simulate": {"weight": {"format": "e3m2"}, "hadamard": 16, "hadamard_gemms": ["fprop", "fprop"]})" + all,
       "simulate.hadamard_gemms: lists fprop twice"},
  };
  std::vector<std::pair<std::string, std::string>> wrong(std::begin(cases), std::end(cases));
  for (const char* const format : {"e0m3", "e8m1", "e4m8", "e4m10", "x4m1", "e4n1"})
    wrong.emplace_back(text(R"("simulate": {"input": {"format": ")", format, "\"}}", all), "simulate.input.format: must be eXmY");
  for (const auto& [recipe, message] : wrong) {
    const std::string errors = own(recipe).errors();
    EXPECT_THAT(errors, HasSubstr("precision.recipes.own." + message)) << recipe;
    EXPECT_THAT(errors, HasSubstr("(c.json:")) << recipe;
  }
}

TEST(SimulatedRecipe, SizesThatCutABlockAreRefused) {
  const auto errors = [](const std::string& simulate, int64_t tensor = 1) {
    return own(R"("simulate": {)" + simulate + R"(}, "gemms": ["fprop", "dgrad", "wgrad"])", small_model(), tensor).errors();
  };
  const std::string rows = R"({"format": "e3m2", "block": [1, 40]})", tiles = R"({"format": "e3m2", "block": [64, 4]})";
  EXPECT_THAT(errors(R"("input": )" + rows),
              HasSubstr("model.hidden_size 64 (layers.*.attn.out, layers.*.attn.qkv, layers.*.mlp.gate_up), model.intermediate_size "
                        "96 (layers.*.mlp.down): each is not a multiple of 40, the block of simulate in recipe own"));
  EXPECT_THAT(errors(R"("output_grad": )" + rows), HasSubstr("is not a multiple of 40, the block of simulate in recipe own"));
  EXPECT_THAT(errors(R"("weight": )" + tiles), HasSubstr("model.intermediate_size 96 is not a multiple of 64"));
  EXPECT_EQ(errors(R"("input": )" + tiles), "") << "tiles of tokens and channels";
  EXPECT_THAT(errors(R"("input": {"format": "e3m2", "block": [1, 64]})"), HasSubstr("model.intermediate_size 96 is not a multiple of 64"))
      << "of mlp.down";
  EXPECT_THAT(errors(R"("input": {"format": "e3m2", "block": [1, 32]})", 2),
              HasSubstr("cannot be divided among the 2 ranks of parallel.tensor in multiples of 32, the block of simulate in recipe own"));
}

TEST(SimulatedRecipe, SizesOfExpertsAreWholeBlocks) {
  ModelConfig model = small_model();
  model.moe.emplace();
  model.moe->num_experts = 4;
  model.moe->num_experts_per_tok = 2;
  model.moe->intermediate_size = 32;
  EXPECT_EQ(own(kNvfp4, model).errors(), "");
  model.moe->intermediate_size = 24;
  EXPECT_THAT(own(kNvfp4, model).errors(), HasSubstr("each of layers.*.moe.experts.down, layers.*.moe.experts.gate_up does not fit its "
                                                     "recipe: model.moe.intermediate_size 24 is not a multiple of 16, the "
                                                     "block of simulate in recipe own"));
  EXPECT_EQ(own(kNvfp4, model, 1, R"(, "rules": [{"match": "layers.*.moe.experts.*", "recipe": "high"}])").errors(), "");
}

// Blocks of 8 fit, transforms of 32 do not: along the rows of a weight in fprop, along its columns in dgrad.
TEST(SimulatedRecipe, SizesAreWholeTransforms) {
  const auto transforming = [](const char* gemm, const ModelConfig& model) {
    return own(text(R"("simulate": {"weight": {"format": "e3m2", "block": [1, 8]}, "input": {"format": "e3m2", "block": [1, 8]},
                        "output_grad": {"format": "e3m2", "block": [1, 8]}, "hadamard": 32, "hadamard_gemms": [")",
                    gemm, R"("]}, "gemms": ["fprop", "dgrad", "wgrad"])"),
               model)
        .errors();
  };
  ModelConfig model = small_model();
  for (const char* const gemm : {"fprop", "dgrad", "wgrad"}) EXPECT_EQ(transforming(gemm, model), "") << gemm;
  model.intermediate_size = 72;
  const std::string problem =
      "does not fit its recipe: model.intermediate_size 72 is not a multiple of 32, the block of simulate in recipe own";
  EXPECT_THAT(transforming("fprop", model), HasSubstr("layers.*.mlp.down " + problem));
  EXPECT_THAT(transforming("dgrad", model), HasSubstr("layers.*.mlp.gate_up " + problem));
  EXPECT_EQ(transforming("wgrad", model), "") << "along tokens, which are padded";
}

TEST(SimulatedRecipe, OutputProjectionsInFp8AndModulesWithoutAGemmCannotHaveIt) {
  EXPECT_THAT(own(kNvfp4, small_model(), 1, R"(, "fp8_output_proj": true)").errors(),
              HasSubstr("excludes an ambient recipe with simulated operands, as \"own\" has"));
  EXPECT_THAT(own(kNvfp4, small_model(), 1, R"(, "rules": [{"match": "final_norm", "recipe": "own"}])").errors(),
              HasSubstr("final_norm has no GEMM, so \"own\" has nothing to quantize"));
}

TEST(SimulatedRecipe, ACompleteConfigStaysAsItIs) {
  const std::string written = effective_config(own(kNvfp4).config);
  EXPECT_EQ(effective_config(config_from_json<PrecisionConfig>(written, "written", ExitCode::internal)), written);
  EXPECT_THAT(written, HasSubstr("\"hadamard\": 16"));
}

}  // namespace mantissa::simulated_recipe_test
