// Warnings of a plan: it is allowed, but it costs something or does nothing.
#include <gmock/gmock.h>

#include "mantissa/precision/plan.h"
#include "models/model_shape.h"
#include "plan/cost.h"

namespace mantissa::precision_warnings_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// The plan of a "precision" section, for a model with 12 linears.
PrecisionPlan plan_of(const std::string& section) {
  ModelConfig model;
  model.vocab_size = 64;
  model.hidden_size = 64;
  model.num_layers = 3;
  model.num_attention_heads = 2;
  model.intermediate_size = 96;
  model.max_position_embeddings = 16;
  ConfigReport report;
  const auto config = config_from_json<PrecisionConfig>(section, "c.json", ExitCode::usage);
  PrecisionPlan plan = PrecisionPlan::resolve(config, model_shape(model), report);
  report.throw_if_failed();
  return plan;
}

std::vector<std::string> warnings(const std::string& section) { return plan_of(section).warnings(); }

TEST(PlanWarnings, NameWhatCostsOrDoesNothing) {
  for (const char* const none :
       {"{}", R"({"recipe": "mxfp4_qat"})", R"({"recipe": "mxfp8", "fp8_param_gather": true})", R"({"recipe": "mxfp8"})",
        R"({"recipe": "mxfp8_te"})", R"({"recipe": "mxfp4_qat", "report_interval": 10})",
        R"({"recipe": "mxfp8", "fp8_param_gather": true, "fp8_output_proj": {"enabled": true, "fprop": false}})"}) {
    EXPECT_THAT(warnings(none), IsEmpty()) << none;
  }
  const std::string rows =
      R"({"recipe": "r", "fp8_param_gather": true, "recipes": {"r": {"weight": {"format": "e4m3"}, "gemms": ["fprop", "dgrad"]}}})";
  const std::string unread = R"({"recipe": "r", "recipes": {"r": {"weight": {"format": "e4m3"}, "gemms": ["wgrad"]}}})";
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {R"({"recipe": "mxfp8", "fp8_param_gather": true, "rules": [{"match": "layers.0.*", "recipe": "high"}]})",
       {"4 of 12 linears have no quantized weight"}},
      {rows, {"12 weights are quantized in rows of blocks"}},
      {unread, {"quantizes weight, which none of its gemms reads", "lists wgrad, which has no quantized or simulated operand"}},
      {R"({"report_interval": 10})", {"precision.report_interval measures nothing"}},
      {R"({"fp8_output_proj": {"fprop": false}})", {"precision.fp8_output_proj is not enabled"}}};
  for (const auto& [section, parts] : cases) {
    const std::vector<std::string> found = warnings(section);
    ASSERT_EQ(found.size(), parts.size()) << section;
    for (size_t i = 0; i < parts.size(); ++i) EXPECT_THAT(found[i], HasSubstr(parts[i]));
  }
}

// The plan of a recipe that quantizes all operands, weights in rows of blocks.
PrecisionPlan plan_of_rows(const std::string& gemms, const std::string& switches, const std::string& choices = "") {
  return plan_of(R"({"recipe": "r", "recipes": {"r": {"weight": {"format": "e4m3"}, "input": {"format": "e4m3"},
      "output_grad": {"format": "e4m3"}, "gemms": [)" +
                 gemms + "]" + choices + "}}" + switches + "}");
}
const std::string kAllGemms = R"("fprop", "dgrad", "wgrad")", kGather = R"(, "fp8_param_gather": true)";

TEST(PlanWarnings, TheWarningOfRowsIsOfWeightsThatDgradHasRequantized) {
  const auto of_rows = Contains(HasSubstr("dgrad multiplies by codes requantized along columns"));
  EXPECT_THAT(plan_of_rows(R"("fprop", "dgrad")", "").warnings(), of_rows);
  EXPECT_THAT(plan_of_rows(kAllGemms, kGather).warnings(), of_rows);
  EXPECT_THAT(plan_of_rows(R"("fprop", "wgrad")", "").warnings(), Not(of_rows));  // dgrad multiplies by values
  EXPECT_THAT(plan_of_rows(kAllGemms, "", R"(, "columns": "values")").warnings(), IsEmpty());
}

TEST(PlanWarnings, TheCostOfRowsIsNoWarningAndSpeaksOfTheWireOnlyWhereItIsConcerned) {
  const auto cost = [](const std::string& gemms, const std::string& switches) {
    return plan_of_rows(gemms, switches).cost_of_rows().value_or("");
  };
  EXPECT_THAT(cost(R"("fprop", "wgrad")", ""),
              AllOf(HasSubstr("12 weights in rows of blocks"), EndsWith("bytes more of scales in memory")));
  EXPECT_THAT(cost(kAllGemms, kGather), EndsWith("in memory and on the wire"));
  EXPECT_THAT(cost(kAllGemms, kGather + R"(, "fp8_output_proj": true)"), EndsWith(" of them on the wire, too"));
  EXPECT_TRUE(plan_of(R"({"recipe": "mxfp8_te"})").cost_of_rows());
  for (const char* none : {"mxfp8", "high", "mxfp4_qat"})
    EXPECT_FALSE(plan_of(text(R"({"recipe": ")", none, "\"}")).cost_of_rows()) << none;
}

TEST(PlanWarnings, ABiasWhoseGradientSumsCodesIsAWarning) {
  const auto warned = [](int64_t bias, const std::string& recipe) {
    const auto down = [bias](const char* path) {
      return ModuleShape{.path = path, .role = ModuleRole::mlp_output, .out = 32, .in = 32, .bias = bias, .experts = true};
    };
    const ModelShape model{.modules = {down("layers.0.moe.experts.down"), down("layers.1.moe.experts.down")}};
    PrecisionConfig config;
    config.recipe = recipe;
    config.fp8_param_gather = recipe == "mxfp8";
    ConfigReport report;
    return PrecisionPlan::resolve(config, model, report).warnings();
  };
  EXPECT_THAT(warned(32, "mxfp8"), ElementsAre(HasSubstr("model.moe.expert_mlp_bias: the gradient of the bias of layers.{0..1}.moe.")));
  EXPECT_THAT(warned(0, "mxfp8"), IsEmpty());
  EXPECT_THAT(warned(32, "mxfp4_qat"), IsEmpty()) << "values travel";
}

TEST(PlanWarnings, ExpertsOfOneLayerWithDifferentFormatsAreAWarning) {
  const ModelShape model{
      .modules = {{.path = "layers.0.moe.experts.gate_up", .out = 64, .in = 32, .experts = true},
                  {.path = "layers.0.moe.experts.down", .role = ModuleRole::mlp_output, .out = 32, .in = 32, .experts = true}}};
  PrecisionConfig config;
  config.rules = {{.match = "*.gate_up", .recipe = "mxfp4_qat"}};
  ConfigReport report;
  const PrecisionPlan plan = PrecisionPlan::resolve(config, model, report);
  EXPECT_THAT(plan.warnings(), ElementsAre(HasSubstr("layers.0.moe.experts.gate_up (precision.rules.0) and layers.0.moe.experts.down "
                                                     "(precision.recipe) have different weight formats")));
}

// A model of two layers with experts, at some ranks that share them.
RunConfig with_experts(const std::string& recipe, bool quantized_dispatch, int64_t expert = 1) {
  RunConfig config;
  config.model.vocab_size = 64;
  config.model.num_layers = 2;
  config.model.moe.emplace();
  config.precision.recipe = recipe;
  config.precision.quantized_dispatch = quantized_dispatch;
  config.parallel.data = config.parallel.expert = expert;
  return config;
}

TEST(PlanWarnings, TellWhereQuantizedDispatchDoesNothing) {
  const auto advice = [](const char* recipe, bool on) { return resolve_plan(with_experts(recipe, on)).dispatch_advice(); };
  EXPECT_EQ(advice("mxfp8_te", true).value_or(""),
            "precision.quantized_dispatch: training dispatches rows of layers.{0..1}.moe.experts.down, layers.{0..1}.moe.experts.gate_up "
            "as values (tokens, and for down output gradients), because recipe \"mxfp8_te\" quantizes columns from values");
  for (const char* const none : {"mxfp8", "high", "mxfp4_qat"}) EXPECT_EQ(advice(none, true), std::nullopt) << none;
  EXPECT_EQ(advice("mxfp8_te", false), std::nullopt) << "nobody asks for it";
  const auto idle = Contains(HasSubstr("precision.quantized_dispatch false has no effect"));
  for (const char* const none : {"mxfp8_te", "high", "mxfp4_qat"})
    EXPECT_THAT(resolve_plan(with_experts(none, false)).warnings(), idle) << none;
  for (const char* const moved : {"mxfp8", "fp8_block"})
    EXPECT_THAT(resolve_plan(with_experts(moved, false)).warnings(), Not(idle)) << moved;
  EXPECT_THAT(warnings(R"({"recipe": "mxfp8", "quantized_dispatch": false})"), idle) << "there are no experts";
}

// Tokens of frozen experts travel as codes where those of trained ones travel as values: a step sends fewer bytes, and the advice is silent
// about them.
TEST(PlanWarnings, TellOfFrozenExpertsAsTheStepDispatches) {
  const auto frozen = [](const char* match, bool on) {
    RunConfig config = with_experts("mxfp8_te", on, 2);
    config.training.grad_accum = 1;
    config.training.global_batch_size = 2 * config.training.micro_batch_size;
    if (*match != '\0') config.optimizer.rules = {{.match = match, .lr_factor = 0.0, .weight_decay = {}}};
    return config;
  };
  const auto advice = [&](const char* match) { return resolve_plan(frozen(match, true)).dispatch_advice().value_or(""); };
  const auto sent = [&](const char* match, bool on) {
    const RunConfig config = frozen(match, on);
    return step_bytes(config, resolve_plan(config)).sent.activations;
  };
  EXPECT_LT(sent("*.experts.gate_up", true), sent("", true));
  EXPECT_THAT(advice("*.experts.gate_up"), HasSubstr("dispatches rows of layers.{0..1}.moe.experts.down as values"));
  EXPECT_EQ(sent("*.experts.down", true), sent("", true));
  EXPECT_EQ(advice("*.experts.down"), advice(""));
  EXPECT_LT(sent("*.experts.gate_up", true), sent("*.experts.gate_up", false));
  const auto idle = Contains(HasSubstr("precision.quantized_dispatch false has no effect"));
  EXPECT_THAT(resolve_plan(frozen("*.experts.gate_up", false)).warnings(), Not(idle));
  EXPECT_THAT(resolve_plan(frozen("*.experts.down", false)).warnings(), idle);
}

// On one rank nothing travels far; a run of mxfp8_te has nothing to be warned of.
TEST(RunWarnings, OfTokensThatTravelAsValuesAreOfRanksThatShareExperts) {
  const auto found = [](const char* recipe, int64_t ranks) {
    const RunConfig config = with_experts(recipe, true, ranks);
    return run_warnings(config, resolve_plan(config));
  };
  EXPECT_THAT(found("mxfp8_te", 1), IsEmpty());
  EXPECT_THAT(found("mxfp8_te", 2), Contains(HasSubstr(" as values (tokens, and for down output gradients), because ")));
  EXPECT_THAT(found("mxfp8", 2), Not(Contains(HasSubstr("training dispatches rows"))));
}

TEST(PlanWarnings, AGatherOfCodesIsAdvisedWhereItSavesBytes) {
  EXPECT_THAT(plan_of(R"({"recipe": "mxfp8"})").gather_advice().value_or(""),
              HasSubstr("precision.fp8_param_gather is off: 12 quantized weights"));
  for (const char* const none : {"{}", R"({"recipe": "mxfp8", "fp8_param_gather": true})", R"({"recipe": "mxfp4_qat"})"})
    EXPECT_EQ(plan_of(none).gather_advice(), std::nullopt) << none;
}

TEST(RunWarnings, NameWhatARunWillNotDo) {
  RunConfig config;
  config.model.vocab_size = 64;
  const auto found = [&] { return run_warnings(config, resolve_plan(config)); };
  EXPECT_THAT(found(), IsEmpty());
  config.schedule.warmup_steps = *config.training.steps - 1;
  EXPECT_THAT(found(), IsEmpty()) << "the last step is at the peak";
  config.schedule.warmup_steps = *config.training.steps;
  EXPECT_THAT(found(),
              ElementsAre("schedule.warmup_steps 1000: the run ends after 1000 steps, so the learning rate never reaches optimizer.lr"));
  config.schedule.warmup_steps = 0;
  config.model.activation = Activation::gelu_erf;
  config.model.norm = Norm::layer;
  EXPECT_THAT(found(),
              ElementsAre(::testing::StartsWith("the model cannot be exported: no model of Hugging Face has these options, of which "
                                                "GPT-2 is the nearest: model.")));
  EXPECT_THAT(found().front(), ::testing::Not(HasSubstr("\n")));
  config.model = {};
  config.model.vocab_size = 64;
  config.precision.recipe = "mxfp8";
  for (const int64_t ranks : {1, 2}) {
    config.parallel.data = ranks;
    EXPECT_EQ(found().size(), ranks == 1 ? 0U : 1U) << "precision.fp8_param_gather is off";
  }
}

}  // namespace mantissa::precision_warnings_test
