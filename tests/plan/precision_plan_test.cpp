// The plan: storage, wire, export and bytes of each preset; refusals; hash and JSON. The modules are those of a real model; the table is
// that of integration/explain_test.cpp.
#include <gmock/gmock.h>

#include "files.h"
#include "json_values.h"
#include "mantissa/precision/plan.h"
#include "models/model_shape.h"
#include "testing.h"

namespace mantissa::precision_plan_test {

using test::error_of;
using ::testing::HasSubstr;
using ::testing::Not;

ModelConfig small_model() {
  ModelConfig model;
  model.vocab_size = 65;
  model.pad_vocab_to = 32;
  model.hidden_size = 64;
  model.num_layers = 3;
  model.num_attention_heads = 2;
  model.num_key_value_heads = 1;
  model.intermediate_size = 96;
  model.max_position_embeddings = 16;
  return model;
}

struct Planned {
  PrecisionPlan plan{Dtype::f32, {}};
  ConfigReport report;
  std::string errors() const {
    return report.ok() ? "" : error_of([&] { report.throw_if_failed(); }).what();
  }
};

// The plan of a "precision" section.
Planned planned(const std::string& section, const ModelConfig& model = small_model()) {
  Planned p;
  PrecisionConfig config = config_from_json<PrecisionConfig>(section, "c.json", ExitCode::usage);
  p.plan = PrecisionPlan::resolve(config, model_shape(model), p.report);
  return p;
}

std::string formats(const ModulePrecision& entry) {
  return text(stored_type_name(entry.storage), ' ', stored_type_name(entry.wire), ' ', stored_type_name(entry.exported));
}

// Bytes per element of one linear without a bias.
double per_parameter(const ModulePrecision& entry) {
  return static_cast<double>(entry.bytes) / static_cast<double>(entry.module.weight_elements());
}

TEST(Plan, EachPresetHasItsStorageWireExportAndBytes) {
  const auto check = [](const std::string& section, const char* expected, double bytes) {
    const Planned p = planned(section, [] {
      ModelConfig model = small_model();  // whole blocks of 128 in layers.*.mlp.down
      model.hidden_size = 256;
      model.intermediate_size = 512;
      return model;
    }());
    ASSERT_EQ(p.errors(), "") << section;
    const ModulePrecision& down = p.plan.of("layers.1.mlp.down");
    EXPECT_EQ(formats(down), expected) << section;
    EXPECT_DOUBLE_EQ(per_parameter(down), bytes) << section;
  };
  check(R"({})", "bf16 bf16 bf16", 2);
  check(R"({"dtype": "fp32"})", "fp32 fp32 fp32", 4);
  check(R"({"recipe": "fp32"})", "fp32 fp32 fp32", 4);
  check(R"({"dtype": "fp32", "recipe": "bf16"})", "bf16 bf16 bf16", 2);
  check(R"({"recipe": "mxfp8"})", "bf16 bf16 e4m3", 3 + 1.0 / 1024);
  check(R"({"recipe": "mxfp8", "fp8_param_gather": true})", "e4m3 e4m3 e4m3", 1 + 1.0 / 1024);
  check(R"({"recipe": "mxfp8_te"})", "bf16 bf16 e4m3", 3 + 1.0 / 32);
  check(R"({"recipe": "mxfp8_weights"})", "bf16 bf16 e4m3", 3 + 1.0 / 1024);
  check(R"({"recipe": "mxfp8_weights", "fp8_param_gather": true})", "e4m3 e4m3 e4m3", 1 + 1.0 / 1024);
  check(R"({"recipe": "fp8_block", "fp8_param_gather": true})", "e4m3 e4m3 e4m3", 1 + 1.0 / 16384);
  check(R"({"recipe": "mxfp4_qat"})", "bf16 bf16 e2m1", 2 + 0.5 + 1.0 / 32);
  check(R"({"recipe": "mxfp4_qat_mxfp8_act"})", "bf16 bf16 e2m1", 2 + 0.5 + 1.0 / 32);
  check(R"({"dtype": "fp32", "recipe": "mxfp4_qat"})", "fp32 fp32 e2m1", 4 + 0.5 + 1.0 / 32);
  const std::string rows = R"("recipe": "r", "recipes": {"r": {"weight": {"format": "e5m2"}, "gemms": ["fprop", "dgrad"]}})";
  check("{" + rows + "}", "bf16 bf16 e5m2", 3 + 1.0 / 32);
  check("{" + rows + R"(, "fp8_param_gather": true})", "e5m2 e5m2 e5m2", 1 + 1.0 / 32);
  check(R"({"recipe": "r", "recipes": {"r": {"weight": {"format": "e4m3"}, "gemms": ["dgrad"]}}})", "bf16 bf16 bf16", 3 + 1.0 / 32);
}

// Sizes of SmolLM2-135M: 576 is 4.5 blocks of 128, and q, k and v together are 7.5.
ModelConfig smol() {
  ModelConfig model = small_model();
  model.hidden_size = 576, model.num_attention_heads = 9, model.num_key_value_heads = 3, model.intermediate_size = 1536;
  return model;
}

TEST(Plan, TheLastBlocksOf128MayBeSmallerAndHaveScalesOfTheirOwn) {
  const Planned p = planned(R"({"recipe": "fp8_block", "fp8_param_gather": true})", smol()),
                beside = planned(R"({"recipe": "fp8_block"})", smol());
  ASSERT_EQ(p.errors() + beside.errors(), "");
  const std::pair<const char*, int64_t> scales[] = {
      {"attn.qkv", 8 * 5}, {"attn.out", 5 * 5}, {"mlp.gate_up", 24 * 5}, {"mlp.down", 5 * 12}};
  for (const auto& [module, count] : scales) {
    const std::string path = text("layers.1.", module);
    const int64_t elements = p.plan.of(path).module.weight_elements();
    EXPECT_EQ(p.plan.of(path).bytes, elements + count) << module;
    EXPECT_EQ(beside.plan.of(path).bytes, 3 * elements + count) << module;
  }
  const std::string row = R"({"format": "e4m3", "block": [1, 128]})";
  const Planned rows =
      planned(R"({"recipe": "own", "recipes": {"own": {"gemms": ["fprop", "dgrad", "wgrad"], "weight": )" + row + R"(, "input": )" + row +
                  R"(, "output_grad": )" + row + R"(}}, "rules": [{"match": "layers.{1,2}.*", "recipe": "high"}]})",
              smol());
  ASSERT_EQ(rows.errors(), "");
  EXPECT_EQ(rows.plan.of("layers.0.attn.out").bytes, 3 * 576 * 576 + 576 * 5);
  const int64_t more = (960 + 3072 + 576) * 5 + 576 * 12 - (8 + 24 + 5) * 5 - 5 * 12;
  EXPECT_THAT(rows.plan.cost_of_rows().value_or(""), HasSubstr(text("4 weights in rows of blocks, not tiles: ", more, " bytes more")));
}

// 2.5 and 3.125 blocks of 32; q, k and v together are 5.
ModelConfig ragged() {
  ModelConfig model = small_model();
  model.hidden_size = 80, model.intermediate_size = 100;
  return model;
}

TEST(Plan, TheLastBlocksOf32MayBeSmallerAndHaveScalesOfTheirOwn) {
  const auto bytes = [](const std::string& recipe, const char* module) {
    const Planned p =
        planned(text(R"({"recipe": ")", recipe, R"(", "fp8_param_gather": )", recipe == "mxfp8" ? "true" : "false", "}"), ragged());
    EXPECT_EQ(p.errors(), "") << recipe;
    return p.plan.of(text("layers.1.", module)).bytes;
  };
  const std::tuple<const char*, int64_t, int64_t> shapes[] = {
      {"attn.qkv", 160, 80}, {"attn.out", 80, 80}, {"mlp.gate_up", 200, 80}, {"mlp.down", 80, 100}};
  for (const auto& [module, out, in] : shapes) {
    const int64_t across = ceil_div(in, 32), tiles = ceil_div(out, 32) * across;
    EXPECT_EQ(bytes("mxfp8", module), out * in + tiles) << module;
    EXPECT_EQ(bytes("mxfp8_weights", module), 3 * out * in + tiles) << module;
    for (const char* const recipe : {"mxfp4_qat", "mxfp4_qat_mxfp8_act"})
      EXPECT_EQ(bytes(recipe, module), 2 * out * in + out * in / 2 + out * across) << module;
  }
}

std::string errors_of(const ModelConfig& model, int64_t tensor, const std::string& recipe) {
  PrecisionConfig config = config_from_json<PrecisionConfig>(recipe, "c.json", ExitCode::usage);
  ConfigReport report;
  PrecisionPlan::resolve(config, model_shape(model, tensor), report);
  return report.ok() ? "" : std::string(error_of([&] { report.throw_if_failed(); }).what());
}

TEST(Plan, BlocksOf32AreWholeBetweenRanksAndExperts) {
  ModelConfig model = ragged();
  model.num_key_value_heads = 2;
  for (const std::string recipe : {"mxfp8", "mxfp8_weights", "mxfp4_qat"}) {
    const std::string section = R"({"recipe": ")" + recipe + "\"}", ranks = errors_of(model, 2, section);
    EXPECT_EQ(errors_of(model, 1, section), "");
    for (const char* const size : {"model.hidden_size 80 (layers.*.attn.", "model.intermediate_size 100 (layers.*.mlp."})
      EXPECT_THAT(ranks, HasSubstr(size)) << recipe;
    EXPECT_THAT(ranks, HasSubstr("each cannot be divided among the 2 ranks of parallel.tensor in multiples of 32, the block of "))
        << recipe;
  }
  model.head_dim = 32, model.intermediate_size = 128;
  EXPECT_EQ(errors_of(model, 2, R"({"recipe": "mxfp8"})"), "") << "all ranks have whole rows of 80 elements";
  // A cell of hashes is 36 columns there, which a share must not begin inside.
  const std::string twelve =
      R"({"recipe": "own", "recipes": {"own": {"weight_fake_quant": {"format": "e2m1", "block": [1, 12], "rule": "rceil"}}}})";
  model.intermediate_size = 192;
  EXPECT_THAT(errors_of(model, 2, twelve), HasSubstr("in multiples of 36, the block of codes of recipe"));
  model.intermediate_size = 128;
  model.moe = MoeConfig{.num_experts = 4, .num_experts_per_tok = 2, .intermediate_size = 40};
  const std::string torn = errors_of(model, 1, R"({"recipe": "mxfp8"})");
  EXPECT_THAT(torn, HasSubstr("model.hidden_size 80 (layers.*.moe.experts.down), output size 80, 2 times model.moe.intermediate_size 40, "
                              "(layers.*.moe.experts.gate_up): each is not a multiple of 32, the block of recipe mxfp8"));
  EXPECT_EQ(errors_of(model, 1, R"({"recipe": "mxfp4_qat_mxfp8_act"})"), "") << "there are no tiles";
  model.hidden_size = 96, model.moe->intermediate_size = 48;
  EXPECT_EQ(errors_of(model, 1, R"({"recipe": "mxfp8"})"), "") << "96 rows of gate and up";
}

// Blocks belong to one rank, and tiles to one expert.
TEST(Plan, BlocksOf128AreWholeBetweenRanksAndExperts) {
  const auto errors = [](const ModelConfig& model, int64_t tensor, const std::string& recipe = R"({"recipe": "fp8_block"})") {
    return errors_of(model, tensor, recipe);
  };
  EXPECT_EQ(errors(smol(), 1), "");
  const std::string ranks = errors(smol(), 3);
  EXPECT_THAT(ranks, HasSubstr("cannot be divided among the 3 ranks of parallel.tensor in multiples of 128, the block of recipe fp8_block: "
                               "use fewer ranks"));
  EXPECT_THAT(ranks, HasSubstr("each of layers.*.attn.out, layers.*.attn.qkv does not fit its recipe: model.hidden_size 576 "));
  EXPECT_THAT(ranks, Not(HasSubstr("mlp.down"))) << "512 of its columns a rank, and rows that all ranks have";
  ModelConfig experts = smol();
  experts.moe = MoeConfig{.num_experts = 4, .num_experts_per_tok = 2, .intermediate_size = 192};
  const std::string torn = errors(experts, 1);
  EXPECT_THAT(torn,
              HasSubstr("precision.recipe: layers.*.moe.experts.down does not fit its recipe: model.hidden_size 576 is not a multiple "
                        "of 128, the block of recipe fp8_block"));
  EXPECT_THAT(torn, Not(HasSubstr("gate_up"))) << "384 rows of an expert";
  const std::string inputs =
      R"({"recipe": "own", "recipes": {"own": {"input": {"format": "e4m3", "block": [1, 128]}, "gemms": ["fprop"]}}})";
  EXPECT_EQ(errors(experts, 1, inputs), "");
}

TEST(Plan, WhatNoRuleMatchesTakesTheAmbientRecipeIfItIsALinear) {
  const Planned p = planned(R"({"recipe": "mxfp8", "rules": [{"match": "layers.{0,-1}.*", "recipe": "high"},
    {"match": "layers.*.attn_norm", "recipe": "bf16"}]})");
  ASSERT_EQ(p.errors(), "");
  const auto decided = [&](const char* path) { return text(p.plan.of(path).recipe.name, " by ", p.plan.of(path).rule); };
  EXPECT_EQ(decided("layers.0.attn.qkv"), "high by precision.rules.0");
  EXPECT_EQ(decided("layers.2.mlp.down"), "high by precision.rules.0");
  EXPECT_EQ(decided("layers.1.attn.qkv"), "mxfp8 by precision.recipe");
  EXPECT_EQ(decided("layers.2.attn_norm"), "bf16 by precision.rules.1");
  for (const char* const path : {"embed", "layers.1.mlp_norm", "layers.1.attn.q_norm", "final_norm", "output"}) {
    EXPECT_EQ(decided(path), "high by ") << path;
  }
  EXPECT_EQ(p.plan.of("layers.0.attn.qkv").match, "layers.{0,-1}.*");
  EXPECT_EQ(error_of([&] { p.plan.of("layers.3.attn.qkv"); }).code(), ExitCode::internal);
}

TEST(Plan, ParameterGatherKeepsWhatHasNoQuantizedWeight) {
  const Planned p = planned(R"({"recipe": "mxfp8", "fp8_param_gather": true, "fp8_output_proj": true,
    "rules": [{"match": "layers.0.*", "recipe": "high"}, {"match": "layers.1.*", "recipe": "mxfp4_qat"}]})");
  ASSERT_EQ(p.errors(), "");
  EXPECT_EQ(formats(p.plan.of("layers.0.attn.qkv")), "bf16 bf16 bf16");
  EXPECT_EQ(formats(p.plan.of("layers.1.attn.qkv")), "bf16 bf16 e2m1");
  EXPECT_EQ(formats(p.plan.of("layers.2.attn.qkv")), "e4m3 e4m3 e4m3");
  EXPECT_EQ(formats(p.plan.of("output")), "bf16 bf16 e4m3");
  EXPECT_EQ(formats(p.plan.of("embed")), "bf16 bf16 bf16");
  EXPECT_DOUBLE_EQ(per_parameter(p.plan.of("output")), 3 + 1.0 / 1024);
}

TEST(Plan, BiasesStayInTheComputeType) {
  ModelConfig model = small_model();
  model.mlp_bias = true;
  const Planned p = planned(R"({"recipe": "mxfp8", "fp8_param_gather": true})", model);
  EXPECT_EQ(p.plan.of("layers.0.mlp.down").bytes, 64 * 96 + 64 * 96 / 1024 + 2 * 64);
}

TEST(Plan, TheOutputProjectionTakesTheAmbientFormatsAndItsOwnSwitches) {
  const Planned p = planned(R"({"recipe": "mxfp8", "fp8_output_proj": {"enabled": true, "dgrad": false}, "rules":
    [{"match": "*", "recipe": "high"}]})");
  ASSERT_EQ(p.errors(), "");
  const ModulePrecision& output = p.plan.of("output");
  EXPECT_EQ(output.rule, "precision.fp8_output_proj");
  EXPECT_EQ(output.recipe.weight, (Quantization{Format::e4m3, 32, 32, ScaleRule::rceil}));
  EXPECT_EQ(output.recipe.gemms, (GemmSet{.fprop = true, .dgrad = false, .wgrad = true}));
  EXPECT_EQ(formats(output), "bf16 bf16 e4m3");
  const Planned off = planned(R"({"recipe": "mxfp8"})");
  EXPECT_FALSE(off.plan.of("output").recipe.quantizes());
  EXPECT_EQ(off.plan.of("output").rule, "");
  EXPECT_EQ(formats(planned(R"({"recipe": "mxfp8", "fp8_output_proj": {"enabled": true, "fprop": false}})").plan.of("output")),
            "bf16 bf16 bf16");
}

TEST(Plan, TheOutputProjectionComputesInTheDtypeOfTheRunWhateverTheAmbientRecipe) {
  const auto output = [](const std::string& dtype, const std::string& compute) {
    const Planned p = planned(text(R"({"dtype": ")", dtype, R"(", "recipe": "own", "recipes": {"own": {"compute": ")", compute,
                                   R"(", "weight": {"format": "e4m3"}, "input": {"format": "e4m3"}, "output_grad": {"format": "e4m3"},
      "gemms": ["fprop", "dgrad", "wgrad"]}}, "fp8_output_proj": true})"));
    EXPECT_EQ(p.errors(), "");
    return p.plan.of("output");
  };
  EXPECT_EQ(formats(output("bf16", "fp32")), "bf16 bf16 e4m3");
  EXPECT_EQ(output("bf16", "fp32").recipe.compute, Dtype::bf16);
  EXPECT_EQ(output("bf16", "fp32").bytes, output("bf16", "bf16").bytes);
  EXPECT_EQ(formats(output("fp32", "bf16")), "fp32 fp32 e4m3");
}

struct Refusal {
  std::string section;                       // the section of the config
  std::vector<std::string> parts;            // parts of the message; none: it is accepted
  std::function<void(ModelConfig&)> change;  // changes the small model
};

void expect_refusals(const std::vector<Refusal>& refusals) {
  for (const auto& [section, parts, change] : refusals) {
    SCOPED_TRACE(section);
    ModelConfig model = small_model();
    if (change) change(model);
    const std::string errors = planned(section, model).errors();
    for (const std::string& part : parts) EXPECT_THAT(errors, HasSubstr(part));
    EXPECT_EQ(errors.empty(), parts.empty()) << errors;
  }
}

TEST(Plan, TheOutputProjectionIsRefusedWithoutAnMxfp8RecipeOrAFittingModel) {
  const auto with = [](const std::string& recipe) { return "{\"recipe\": \"" + recipe + "\", \"fp8_output_proj\": true}"; };
  const auto without = [](const std::string& role) {
    std::string own = R"("gemms": ["fprop", "dgrad", "wgrad"])";
    for (const char* const operand : {"weight", "input", "output_grad"}) {
      if (operand != role) own += text(", \"", operand, "\": {\"format\": \"e5m2\"}");
    }
    return R"({"recipe": "own", "recipes": {"own": {)" + own + R"(}}, "fp8_output_proj": true})";
  };
  const std::string needs = "precision.fp8_output_proj: needs an ambient recipe that quantizes weight, input and output_grad";
  std::vector<Refusal> refusals = {
      {with("mxfp8"), {}, {}},
      {with("mxfp8"), {}, [](ModelConfig& model) { model.vocab_size.reset(), model.pad_vocab_to = 1; }},
      {R"({"fp8_output_proj": {"fprop": false}})", {}, {}},
      {without("none"), {}, {}},
      {with("fp8_block"), {"has weight e4m3 128x128 rceil"}, [](ModelConfig& model) { model.hidden_size = model.intermediate_size = 512; }},
      {with("mxfp8"), {"model.tie_word_embeddings must be false"}, [](ModelConfig& model) { model.tie_word_embeddings = true; }},
      {with("mxfp8"), {"excludes model.logits_dtype fp32"}, [](ModelConfig& model) { model.logits_dtype = LogitsDtype::fp32; }},
      {with("mxfp8"), {}, [](ModelConfig& model) { model.pad_vocab_to = 1, model.hidden_size = 72; }},
      {R"({"recipe": "mxfp8", "fp8_output_proj": {"enabled": true, "fprop": false, "dgrad": false, "wgrad": false}})",
       {"fprop, dgrad and wgrad are all off"},
       {}}};
  for (const char* const recipe : {"high", "bf16", "fp32", "mxfp8_weights", "mxfp4_qat", "mxfp4_qat_mxfp8_act"})
    refusals.push_back({with(recipe), {needs}, {}});
  for (const char* const role : {"weight", "input", "output_grad"}) refusals.push_back({without(role), {needs, text(role, " none")}, {}});
  expect_refusals(refusals);
  ModelConfig model = small_model();
  model.num_key_value_heads = 2, model.pad_vocab_to = 1, model.vocab_size = 66, model.intermediate_size = 128;
  EXPECT_THAT(errors_of(model, 2, with("mxfp8")),
              HasSubstr("precision.fp8_output_proj: needs a padded vocabulary in multiples of 64, 32 for each rank of parallel.tensor, got "
                        "66: set model.pad_vocab_to to 64"));
}

void of_experts(ModelConfig& model) {
  model.moe = MoeConfig{.num_experts = 4, .num_experts_per_tok = 2, .intermediate_size = 48, .shared_intermediate_size = 40};
}

// Sizes are named once each, by the key where it is the value of one, for all modules together.
TEST(Plan, SizesThatDoNotFitAreNamedOnce) {
  const auto four_heads = [](ModelConfig& model) { model.num_attention_heads = 4, model.head_dim = 24; };
  const auto narrow = [](ModelConfig& model) { model.intermediate_size = 101; };
  const auto hidden = [](ModelConfig& model) { model.hidden_size = 81, model.head_dim = 32; };
  const auto both = [](ModelConfig& model) { model.hidden_size = 81, model.intermediate_size = 101, model.head_dim = 32; };
  const auto rows_of_99 = [](ModelConfig& model) {
    model.num_attention_heads = 3, model.head_dim = 33, model.position = Position::learned;
  };
  const std::string mxfp8 = R"({"recipe": "mxfp8"})", mxfp4 = R"({"recipe": "mxfp4_qat"})";
  const std::string two_high =
      R"({"recipe": "mxfp4_qat", "rules": [{"match": "layers.1.mlp.*", "recipe": "high"}, {"match": "layers.2.mlp.*", "recipe": "high"}]})";
  const std::string even = "must be even, because a byte holds two codes of a row (weight_fake_quant in recipe mxfp4_qat is e2m1)";
  expect_refusals(
      {{mxfp8, {}, four_heads},
       {mxfp8, {}, both},
       {mxfp8, {}, of_experts},
       {R"({"recipe": "mxfp8", "rules": [{"match": "*.router", "recipe": "mxfp8"}]})", {}, of_experts},
       {R"({"recipe": "mxfp8_weights"})", {}, both},
       {mxfp4, {}, four_heads},
       {R"({"recipe": "r", "recipes": {"r": {"weight_fake_quant": {"format": "e4m3"}}}})", {}, both},
       {R"({"rules": [{"match": "layers.1.mlp.*", "recipe": "mxfp4_qat"}]})",
        {"precision.rules.0.recipe: layers.1.mlp.down does not fit its recipe: model.intermediate_size 101 " + even +
         "; change the size, or give it another recipe by a rule"},
        narrow},
       {R"({"rules": [{"match": "layers.*.mlp.gate_up", "recipe": "mxfp4_qat"}]})", {}, narrow},
       {mxfp4,
        {"precision.recipe: modules do not fit their recipe: model.hidden_size 81 (layers.*.attn.qkv, layers.*.mlp.gate_up), "
         "model.intermediate_size 101 (layers.*.mlp.down): each " +
         even + "; change the sizes, or give the modules another recipe by a rule"},
        both},
       {two_high,
        {"precision.recipe: each of layers.*.attn.qkv, layers.0.mlp.gate_up does not fit its recipe: model.hidden_size 81 must be even"},
        hidden},
       {R"({"recipe": "mxfp4_qat_mxfp8_act"})", {"input size 99 must be even"}, rows_of_99},
       {R"({"recipe": "r", "recipes": {"r": {"input": {"format": "e2m1"}, "gemms": ["fprop"]}}})",
        {"input size 99 must be even, because a byte holds two codes of a row (input in recipe r is e2m1)"},
        rows_of_99}});
  ModelConfig model = small_model();
  both(model);
  EXPECT_THAT(planned(mxfp4, model).errors(), Not(HasSubstr("errors"))) << "one cause";
}

TEST(Plan, WhatHasNoGemmTakesNoQuantizingRecipeAndComputesInTheDtypeOfTheRun) {
  std::vector<Refusal> refusals = {
      {R"({"rules": [{"match": "embed", "recipe": "mxfp8"}]})",
       {"precision.rules.0.recipe: embed is looked up by rows, so its recipe may round the weight alone (weight_fake_quant), as mxfp4_qat "
        "does; \"mxfp8\" quantizes operands of GEMMs"},
       {}},
      {R"({"rules": [{"match": "embed", "recipe": "mxfp4_qat_mxfp8_act"}]})", {"embed is looked up by rows"}, {}},
      {R"({"rules": [{"match": "position", "recipe": "mxfp4_qat"}]})",
       {"position has no GEMM, so \"mxfp4_qat\" has nothing to quantize"},
       [](ModelConfig& model) { model.position = Position::learned; }},
      {R"({"rules": [{"match": "embed", "recipe": "mxfp4_qat"}]})",
       {"embed does not fit its recipe: model.hidden_size 81 must be even, because a byte holds two codes of a row"},
       [](ModelConfig& model) { model.hidden_size = 81, model.head_dim = 32; }},
      {R"({"recipes": {"own": {"base": "mxfp4_qat", "compute": "fp32"}}, "rules": [{"match": "embed", "recipe": "own"}]})",
       {"embed has no GEMM and computes in precision.dtype, bf16; recipe \"own\" computes in fp32"},
       {}},
      {R"({"rules": [{"match": "layers.*.attn_norm", "recipe": "mxfp4_qat"}]})", {"layers.*.attn_norm has no GEMM"}, {}}};
  for (const std::string path : {"embed", "position", "final_norm", "layers.*.mlp_norm", "layers.*.attn.q_norm"}) {
    const auto add = [&](const char* dtype, const char* recipe, std::vector<std::string> parts) {
      refusals.push_back({text(R"({"dtype": ")", dtype, R"(", "recipes": {"own": {"compute": "fp32"}}, "rules": [{"match": ")", path,
                               R"(", "recipe": ")", recipe, "\"}]}"),
                          std::move(parts), [](ModelConfig& model) { model.position = Position::learned; }});
    };
    const std::string has_none = "precision.rules.0.recipe: " + path + " has no GEMM and computes in precision.dtype, ";
    add("bf16", "fp32", {has_none + "bf16; recipe \"fp32\" computes in fp32: use \"high\" for it"});
    add("bf16", "own", {has_none});
    add("fp32", "bf16", {has_none});
    for (const char* const recipe : {"high", "fp32", "own"}) add("fp32", recipe, {});
    for (const char* const recipe : {"high", "bf16"}) add("bf16", recipe, {});
  }
  expect_refusals(refusals);
}

// 96 rows with the padding.
TEST(Plan, ATableOfTokensIsRoundedWhereARuleNamesIt) {
  for (const bool tied : {false, true}) {
    ModelConfig model = small_model();
    model.tie_word_embeddings = tied;
    const auto with = [&](const std::string& recipe) {
      return planned(R"({"recipe": "mxfp8", "recipes": {"rows": {"weight_fake_quant": {"format": "e4m3"}}},
                         "rules": [{"match": "embed", "recipe": ")" +
                         recipe + "\"}]}",
                     model);
    };
    const Planned four = with("mxfp4_qat"), eight = with("rows"), high = with("high");
    EXPECT_EQ(four.errors() + eight.errors(), "");
    EXPECT_EQ(formats(four.plan.of("embed")), "bf16 bf16 e2m1");
    EXPECT_EQ(formats(eight.plan.of("embed")), "bf16 bf16 e4m3");
    EXPECT_DOUBLE_EQ(per_parameter(four.plan.of("embed")), 2 + 0.5 + 1.0 / 32);
    EXPECT_DOUBLE_EQ(per_parameter(eight.plan.of("embed")), 2 + 1 + 1.0 / 32);
    EXPECT_EQ(four.plan.of("embed").rule, "precision.rules.0");
    EXPECT_EQ((std::set<uint64_t>{four.plan.hash(), eight.plan.hash(), high.plan.hash()}).size(), 3U);
    const Json entry = four.plan.to_json().at("modules").at(0);
    EXPECT_EQ(entry.at("gemms").get("fprop"), tied ? Json("bf16 * bf16 of e2m1 1x32") : Json());
    EXPECT_TRUE(high.plan.to_json().at("modules").at(0).at("gemms").get("fprop").is_null());
  }
}

TEST(Plan, SharesOfATableAreWholeCellsOfCodes) {
  const auto errors = [](int64_t tensor, int64_t pad) {
    ModelConfig model = small_model();
    model.pad_vocab_to = pad;
    PrecisionConfig config =
        config_from_json<PrecisionConfig>(R"({"rules": [{"match": "embed", "recipe": "mxfp4_qat"}]})", "c.json", ExitCode::usage);
    ConfigReport report;
    PrecisionPlan::resolve(config, model_shape(model, tensor), report);
    return report.ok() ? "" : std::string(error_of([&] { report.throw_if_failed(); }).what());
  };
  EXPECT_EQ(errors(1, 1), "");
  EXPECT_EQ(errors(2, 64), "");
  EXPECT_THAT(errors(2, 32), HasSubstr("embed does not fit its recipe: padded vocabulary 96 cannot be divided among the 2 ranks of "
                                       "parallel.tensor in multiples of 32, the block of codes of recipe mxfp4_qat"));
}

TEST(Plan, UnknownRecipesNameTheNearestAndErrorsOfAllPartsComeTogether) {
  expect_refusals(
      {{R"({"recipe": "mxfp_8"})", {"precision.recipe: no recipe \"mxfp_8\"; did you mean 'mxfp8'?"}, {}},
       {R"({"recipes": {"mine": {}}, "rules": [{"match": "*", "recipe": "mien"}]})", {"precision.rules.0.recipe:", "'mine'"}, {}},
       {R"({"rules": [{"match": "*"}]})", {"precision.rules.0.recipe: is missing"}, {}},
       {R"({"rules": [{"recipe": "high"}]})", {"precision.rules.0.match: is missing"}, {}},
       {R"({"recipe": "nope", "recipes": {"r": {"gemms": ["fprop"]}}, "rules": [{"match": "layers.*.mpl.*", "recipe": "nor"}],
            "fp8_output_proj": true})",
        {"precision.recipe: no recipe", "precision.recipes.r.gemms: must be empty", "precision.rules.0.match", "precision.rules.0.recipe",
         "precision.fp8_output_proj"},
        {}}});
}

TEST(Plan, ManyRulesAreRefusedAndLongNamesAreCut) {
  const auto rules = [](size_t count, const std::string& rule) {
    return "{\"rules\": [" + test::repeated(rule + ",", count - 1) + rule + "]}";
  };
  EXPECT_THAT(planned(rules(1'000, R"({"match": "*", "recipe": "high"})")).errors(), HasSubstr("999 errors"));  // never reached
  EXPECT_THAT(planned(rules(1'001, R"({"match": "*", "recipe": "high"})")).errors(),
              ::testing::StartsWith("precision.rules: has 1001 rules, at most 1000 are accepted"));
  const std::string name(1'000, 'n');
  EXPECT_THAT(planned(rules(2, R"({"match": ")" + name + R"(", "recipe": ")" + name + "\"}")).errors(),
              AllOf(HasSubstr("4 errors"), HasSubstr("no recipe \"" + name.substr(0, 60) + "...\" (there are "),
                    HasSubstr(".match: \"" + name.substr(0, 60) + "...\" matches no module"), Not(HasSubstr(name.substr(0, 61)))));
}

// The codes are the weights only where every GEMM reads them.
TEST(Plan, ParameterGatherNeedsQuantizedWeightsThatBothGemmsRead) {
  const auto own = [](const std::string& members) {
    return R"({"recipe": "r", "fp8_param_gather": true, "recipes": {"r": {"weight": {"format": "e4m3")" + members + "}}}";
  };
  const std::string all = R"("gemms": ["fprop", "dgrad", "wgrad"], "input": {"format": "e4m3"})", rows = R"(, "block": [1, 32]}, )",
                    tiles = R"(, "block": [32, 32]}, )", values = R"(, "columns": "values")";
  expect_refusals(
      {{R"({"fp8_param_gather": true})", {"precision.fp8_param_gather: needs a module with a quantized weight"}, {}},
       {R"({"fp8_param_gather": true, "recipe": "mxfp4_qat_mxfp8_act"})", {"no recipe in use has one"}, {}},
       {own(R"(}, "gemms": ["fprop"])"), {"gemms of recipe \"r\" (layers.0.attn.qkv) lacks dgrad"}, {}},
       {own(R"(}, "gemms": ["dgrad", "wgrad"])"), {"lacks fprop"}, {}},
       {own(R"(}, "gemms": ["wgrad"])"), {"lacks fprop and dgrad"}, {}},
       {own(R"(}, "gemms": ["fprop", "dgrad"])"), {}, {}},
       {own(rows + all + values),
        {"columns of recipe \"r\" (layers.0.attn.qkv) makes codes for dgrad from values: set columns to rows, or give weight tiles"},
        {}},
       {own(tiles + all + values), {}, {}},
       {own(rows + all), {}, {}},
       {own(rows + R"("gemms": ["fprop"], "input": {"format": "e4m3"}, "backward": "dequantized")"), {}, {}},
       {own(rows + R"("gemms": ["fprop", "wgrad"], "input": {"format": "e4m3"})"), {"lacks dgrad"}, {}}});
}

TEST(Plan, GradientsOfExpertsAreShiftedOnlyWhereColumnsFollowRows) {
  const auto shifted = [](const std::string& section) {
    ModelConfig model = small_model();
    model.moe = MoeConfig{.num_experts = 4, .num_experts_per_tok = 2, .intermediate_size = 64};
    const Planned p = planned(section, model);
    EXPECT_EQ(p.errors(), "");
    return p.plan.of("layers.1.moe.experts.down").recipe.requantizes_output_grad;
  };
  EXPECT_TRUE(shifted(R"({"recipe": "mxfp8"})"));
  EXPECT_FALSE(shifted(R"({"recipe": "mxfp8_te"})"));
}

TEST(Plan, TheHashFollowsWhatIsComputedAndNotItsNames) {
  const uint64_t plain = planned(R"({"recipe": "mxfp8"})").plan.hash();
  EXPECT_EQ(plain, planned(R"({"recipe": "mxfp8"})").plan.hash());
  EXPECT_EQ(plain, planned(R"({"rules": [{"match": "*", "recipe": "mxfp8"}]})").plan.hash());
  EXPECT_EQ(planned("{}").plan.hash(), planned(R"({"recipe": "bf16"})").plan.hash());
  std::set<uint64_t> hashes = {plain};
  const auto own = [](const std::string& members) {
    return R"({"recipe": "r", "recipes": {"r": {"input": {"format": "e4m3"}, )" + members + "}}}";
  };
  const std::string others[] = {R"({})",
                                R"({"dtype": "fp32"})",
                                R"({"recipe": "mxfp8", "dtype": "fp32"})",
                                R"({"recipe": "mxfp8_weights"})",
                                R"({"recipe": "mxfp8", "fp8_param_gather": true})",
                                R"({"recipe": "mxfp8", "fp8_output_proj": true})",
                                R"({"recipe": "mxfp8", "fp8_output_proj": {"enabled": true, "wgrad": false}})",
                                R"({"recipe": "mxfp8", "rules": [{"match": "layers.2.mlp.down", "recipe": "high"}]})",
                                R"({"recipe": "mxfp4_qat"})",
                                R"({"recipe": "mxfp8_te"})",
                                own(R"("gemms": ["fprop", "dgrad", "wgrad"])"),
                                own(R"("gemms": ["fprop", "dgrad", "wgrad"], "columns": "values")"),
                                own(R"("gemms": ["fprop"])"),
                                own(R"("gemms": ["fprop"], "backward": "dequantized")"),
                                own(R"("gemms": ["fprop"], "weight_fake_quant": {"format": "e2m1"})"),
                                own(R"("gemms": ["fprop"], "weight_fake_quant": {"format": "e2m1"}, "backward": "high_precision")")};
  for (const std::string& other : others) EXPECT_TRUE(hashes.insert(planned(other).plan.hash()).second) << other;
}

TEST(Plan, JsonHasEveryModuleAndTheTotals) {
  const PrecisionPlan plan = planned(R"({"recipe": "mxfp8", "rules": [{"match": "layers.0.*", "recipe": "high"}]})").plan;
  const Json all = plan.to_json();
  EXPECT_EQ(all.at("hash").string().size(), 16u);
  EXPECT_EQ(all.at("modules").size(), plan.modules().size());
  // Embedding, three layers (norms, q|k|v, out, norms of heads, gate|up, down), final norm, output.
  EXPECT_EQ(all.at("parameters"), 96 * 64 + 3 * (128 + 128 * 64 + 64 * 64 + 64 + 192 * 64 + 64 * 96) + 64 + 96 * 64);
  int64_t bytes = 0;
  for (const auto& entry : all.at("modules").entries()) bytes += std::get<int64_t>(entry.at("bytes").scalar());
  EXPECT_EQ(all.at("bytes"), bytes);
  const auto entry_of = [&](const std::string& path) -> Json {
    for (const auto& entry : all.at("modules").entries()) {
      if (entry.at("module") == path) return entry;
    }
    return nullptr;
  };
  EXPECT_EQ(entry_of("layers.1.mlp_norm").at("gemms"), nullptr);
  EXPECT_EQ(entry_of("layers.1.mlp_norm").at("rule"), nullptr);
  EXPECT_EQ(entry_of("layers.0.attn.qkv").at("match"), "layers.0.*");
  EXPECT_EQ(entry_of("layers.1.attn.qkv"), test::json(R"({"module": "layers.1.attn.qkv", "kind": "linear", "shape": [128, 64], "bias": 0,
      "parts": [{"name": "q", "out": 64}, {"name": "k", "out": 32}, {"name": "v", "out": 32}],
      "rule": "precision.recipe", "match": null, "recipe": "mxfp8", "compute": "bf16",
      "weight": {"format": "e4m3", "block": [32, 32], "rule": "rceil"}, "input": {"format": "e4m3", "block": [1, 32], "rule": "rceil"},
      "output_grad": {"format": "e4m3", "block": [1, 32], "rule": "rceil"}, "weight_fake_quant": null,
      "gemms": {"fprop": "e4m3 1x32 * e4m3 32x32", "dgrad": "e4m3 1x32 * e4m3 32x32", "wgrad": "e4m3 32x1 * e4m3 32x1 from 1x32"},
      "storage": "bf16", "wire": "bf16", "export": "e4m3", "bytes": 24584})"));
}

}  // namespace mantissa::precision_plan_test
