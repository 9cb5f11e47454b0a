// The whole model, two layers deep: gradients in fp64 for each option, generation against training's forward pass, names and counts.
#include "models/gpt.h"

#include <gmock/gmock.h>

#include <numeric>
#include <set>

#include "files.h"
#include "testing.h"

namespace mantissa::test::gpt_test {

ModelConfig small_model() {
  ModelConfig config;
  config.vocab_size = 11;
  config.hidden_size = 8;
  config.num_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 4;
  config.intermediate_size = 10;
  config.max_position_embeddings = 8;
  config.init_std = 0.3;  // large enough that every path matters
  return config;
}

struct Option {
  const char* name;
  std::function<void(ModelConfig&)> set;
  Recompute recompute = Recompute::none;
  bool segments = false;
};
void PrintTo(const Option& option, std::ostream* out) { *out << option.name; }

void gpt2_shape(ModelConfig& config) {
  config.norm = Norm::layer;
  config.norm_bias = true;
  config.position = Position::learned;
  config.activation = Activation::gelu_tanh;
  config.attention_bias = AttentionBias::all;
  config.mlp_bias = true;
  config.qk_norm = false;
  config.tie_word_embeddings = true;
  config.num_key_value_heads.reset();
}

// Leaves out auxiliary losses, which the loss does not hold.
void with_experts(ModelConfig& config) {
  config.moe = MoeConfig{.num_experts = 5, .num_experts_per_tok = 2, .intermediate_size = 6, .shared_intermediate_size = 4};
  config.moe->aux_loss_coef = 0.0;
  config.moe->dense_layers = {1};
}

std::vector<Option> options() {
  return {{"qwen3", [](ModelConfig&) {}},
          {"llama", [](ModelConfig& c) { c.qk_norm = false; }},
          {"gpt2", gpt2_shape},
          {"nanogpt",
           [](ModelConfig& c) {
             gpt2_shape(c), c.norm_bias = c.mlp_bias = false, c.attention_bias = AttentionBias::none, c.activation = Activation::gelu_erf;
           }},
          {"layer_norm_without_bias", [](ModelConfig& c) { c.norm = Norm::layer; }},
          {"experts", with_experts},
          {"experts_recomputed", with_experts, Recompute::full},
          {"qkv_bias", [](ModelConfig& c) { c.attention_bias = AttentionBias::qkv; }},
          {"mlp_bias", [](ModelConfig& c) { c.mlp_bias = true; }},
          {"learned_positions", [](ModelConfig& c) { c.position = Position::learned; }},
          {"tied", [](ModelConfig& c) { c.tie_word_embeddings = true; }},
          {"padded_vocabulary", [](ModelConfig& c) { c.pad_vocab_to = 8; }},
          {"one_key_head", [](ModelConfig& c) { c.num_key_value_heads = 1; }},
          {"fp32_logits", [](ModelConfig& c) { c.logits_dtype = LogitsDtype::fp32; }},
          {"unscaled_residuals", [](ModelConfig& c) { c.init_residual_scale = false; }},
          {"norm_eps", [](ModelConfig& c) { c.norm_eps = 0.1; }},
          {"rope_theta", [](ModelConfig& c) { c.rope_theta = 100; }},
          {"llama3_rope", [](ModelConfig& c) { c.rope_scaling = {.factor = 4, .original_max_position_embeddings = 3}; }},
          {"yarn_rope", [](ModelConfig& c) { c.rope_scaling = {.type = RopeScaling::yarn, .original_max_position_embeddings = 40}; }},
          {"window", [](ModelConfig& c) { c.sliding_window = 3; }},
          {"window_of_one_layer", [](ModelConfig& c) { c.sliding_window = 2, c.sliding_layers = {1}; }, Recompute::selective, true},
          {"sinks", [](ModelConfig& c) { c.attention_sinks = true; }},
          {"sinks_recomputed", [](ModelConfig& c) { c.attention_sinks = true, c.sliding_window = 3; }, Recompute::selective},
          {"clamped_swiglu", [](ModelConfig& c) { c.activation = Activation::swiglu_clamped; }},
          {"clamped_experts", [](ModelConfig& c) { with_experts(c), c.activation = Activation::swiglu_clamped, c.swiglu_limit = 2; }},
          {"biased_experts", [](ModelConfig& c) { with_experts(c), c.moe->router_bias = c.moe->expert_mlp_bias = true; }},
          {"biased_experts_recomputed", [](ModelConfig& c) { with_experts(c), c.moe->expert_mlp_bias = true; }, Recompute::full},
          {"documents", [](ModelConfig&) {}, Recompute::none, true},
          {"selective_recompute", [](ModelConfig&) {}, Recompute::selective},
          {"full_recompute", [](ModelConfig&) {}, Recompute::full}};
}

struct Text {
  TokenBatch batch;
  Tensor targets;
  int64_t target_count;
};

// Two sequences of six tokens; one target is ignored. With segments the second document of each starts at 2.
Text small_text(Backend& device, bool segments) {
  const std::vector<int32_t> tokens{1, 4, 7, 0, 10, 3, 2, 2, 9, 5, 8, 6}, targets{4, 7, 0, 10, 3, -1, 2, 9, 5, 8, 6, 1};
  const std::vector<int32_t> positions =
      segments ? std::vector<int32_t>{0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3} : std::vector<int32_t>{0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5};
  const std::vector<int32_t> starts{0, 0, 2, 2, 2, 2, 0, 0, 2, 2, 2, 2};
  const auto ids = [&](const std::vector<int32_t>& data) { return from_host(device, Dtype::i32, {12}, data.data()); };
  return {.batch = {.batch = 2, .tokens = ids(tokens), .positions = ids(positions), .segment_starts = segments ? ids(starts) : Tensor()},
          .targets = ids(targets),
          .target_count = 11};
}

class GptOptionTest : public BackendTest, public ::testing::WithParamInterface<Option> {
 protected:
  ModelConfig config() const {
    ModelConfig config = small_model();
    GetParam().set(config);
    return config;
  }
};

TEST_P(GptOptionTest, GradientsAgreeWithCentralDifferences) {
  Gpt model(config(), reference(), high_plan(config(), Dtype::f64), {.recompute = GetParam().recompute, .gradients = true});
  initialize(model.parameters(), 5);
  const Text text = small_text(reference(), GetParam().segments);
  {
    Tape tape;
    const Tape::Scope scope(&tape);
    tape.backward(model.loss(text.batch, text.targets, text.target_count));
  }
  const auto loss = [&] {
    const Tape::Scope paused(nullptr);
    return values(model.loss(text.batch, text.targets, text.target_count).value())[0];
  };
  constexpr double kStep = 2e-6;
  for (Parameter& parameter : model.parameters().all()) {
    ASSERT_TRUE(parameter.leaf.written) << parameter.name;
    const int64_t stride = std::max<int64_t>(1, parameter.shape.elements() / 10);
    const std::vector<double> weights = values(parameter.value()), gradient = values(parameter.leaf.grad);
    for (int64_t i = 0; i < parameter.shape.elements(); i += stride) {
      const auto at = static_cast<size_t>(i);
      set_value(parameter.value(), i, weights[at] + kStep);
      const double above = loss();
      set_value(parameter.value(), i, weights[at] - kStep);
      const double below = loss();
      set_value(parameter.value(), i, weights[at]);
      // Truncation: step^2 / 6 times third derivatives of order 1000, 7e-10. Rounding: 1e-16 / step. Both are far below a wrong gradient.
      EXPECT_NEAR(gradient[at], (above - below) / (2 * kStep), 1e-8) << parameter.name << '[' << i << ']';
    }
  }
}

// Modules of the plan name the parameters, count them and give their shapes without the model.
TEST_P(GptOptionTest, ParametersAreThoseOfThePlan) {
  Gpt model(config(), reference(), high_plan(config(), Dtype::f32), {.recompute = Recompute::none, .gradients = false});
  const PrecisionPlan plan = high_plan(config());
  EXPECT_EQ(plan.parameters(), model.parameters().elements());
  std::vector<std::string> built, shaped;
  for (const Parameter& parameter : model.parameters().all()) {
    built.push_back(text(parameter.name, parameter.shape));
    const std::string& path = plan.module_of(parameter.name).module.path;
    EXPECT_TRUE(parameter.name == path || parameter.name.starts_with(path + '.')) << parameter.name;
  }
  for (const ParameterShape& parameter : parameter_shapes(model_shape(config()))) shaped.push_back(text(parameter.name, parameter.padded));
  EXPECT_THAT(shaped, ::testing::UnorderedElementsAreArray(built));
  for (const ModuleShape& module : model_shape(config()).modules) {
    int64_t rows = 0;
    for (const ModulePart& part : module.parts) rows += part.out;
    EXPECT_TRUE(module.parts.empty() || rows == module.out) << module.path;
  }
}

TEST_P(GptOptionTest, GenerationSeesWhatTrainingSees) {
  Gpt model(config(), fast(), high_plan(config(), Dtype::f32), {.recompute = Recompute::none, .gradients = false});
  initialize(model.parameters(), 5);
  const std::vector<int32_t> tokens{1, 4, 7, 0, 10, 3}, positions{0, 1, 2, 3, 4, 5};
  const Tensor all = model.logits({.batch = 1,
                                   .tokens = from_host(fast(), Dtype::i32, {6}, tokens.data()),
                                   .positions = from_host(fast(), Dtype::i32, {6}, positions.data()),
                                   .segment_starts = {}});
  auto cache = model.new_cache();
  model.next_logits({1, 4, 7}, cache);
  model.next_logits({0}, cache);
  const std::vector<double> last = values(model.next_logits({10, 3}, cache)), expected = values(all.slice(5, 6));
  ASSERT_EQ(last.size(), expected.size());
  for (size_t i = 0; i < last.size(); ++i) EXPECT_NEAR(last[i], expected[i], 1e-5) << i;  // fp32, sums of at most 32 terms of order 1
}

INSTANTIATE_TEST_SUITE_P(All, GptOptionTest, ::testing::ValuesIn(options()),
                         [](const auto& param) { return std::string(param.param.name); });

class GptTest : public BackendTest {};

// The plan of a model whose table of tokens is rounded to a format.
PrecisionPlan table_plan(const ModelConfig& config, Dtype compute, Format format) {
  PrecisionConfig precision;
  precision.dtype = compute;
  RecipeConfig& rows = precision.recipes["rows"];
  rows.compute = compute;
  rows.weight_fake_quant = QuantizationConfig{.format = format};
  precision.rules = {{.match = "embed", .recipe = "rows"}};
  ConfigReport report;
  PrecisionPlan plan = PrecisionPlan::resolve(precision, model_shape(config), report);
  report.throw_if_failed();
  return plan;
}

// Lookup and, if it is tied, output projection read the codes; every gradient is that of the values that the codes stand for.
TEST_F(GptTest, ATableOfCodesComputesAndLearnsAsOneOfTheirValues) {
  for (const bool tied : {true, false}) {
    for (const auto& [compute, format] : {std::pair(Dtype::bf16, Format::e2m1), {Dtype::f32, Format::e2m1}, {Dtype::bf16, Format::e4m3}}) {
      SCOPED_TRACE(text(tied ? "tied " : "untied ", compute));
      ModelConfig config = small_model();
      config.hidden_size = 32;
      config.pad_vocab_to = 8;
      config.tie_word_embeddings = tied;
      Gpt codes(config, fast(), table_plan(config, compute, format), {.recompute = Recompute::none, .gradients = true});
      Gpt values(config, fast(), high_plan(config, compute), {.recompute = Recompute::none, .gradients = true});
      for (Gpt* model : {&codes, &values}) initialize(model->parameters(), 5);
      const ParameterShard table = values.parameters().whole_shards().front();
      ASSERT_EQ(table.of->name, "embed.weight");
      const Text text = small_text(fast(), false);
      const auto loss = [&](Gpt& model) {
        model.parameters().reset_gradients();
        Tape tape;
        const Tape::Scope scope(&tape);
        const Var sum = model.loss(text.batch, text.targets, text.target_count);
        tape.backward(sum);
        return test::values(sum.value())[0];
      };
      EXPECT_NE(loss(codes), loss(values)) << "before the values are those of the codes";
      const Tensor master = values.parameters().room_for_master(table);
      fast().run(Dequantize{.x = codes.parameters().all().front().codes(), .out = master});
      values.parameters().store(table, master);
      EXPECT_EQ(loss(codes), loss(values));
      for (size_t i = 0; i < codes.parameters().all().size(); ++i) {
        const Parameter &a = codes.parameters().all()[i], &b = values.parameters().all()[i];
        EXPECT_TRUE(same_bits(a.leaf.grad, b.leaf.grad)) << a.name;
      }
      EXPECT_TRUE(same_bits(codes.logits(text.batch), values.logits(text.batch)));
      auto cache = codes.new_cache(), cache_of_values = values.new_cache();
      const std::vector<double> next = test::values(codes.next_logits({1, 4, 7}, cache));
      const std::vector<double> next_of_values = test::values(values.next_logits({1, 4, 7}, cache_of_values));
      for (size_t i = 0; i < next.size(); ++i) EXPECT_NEAR(next[i], next_of_values[i], compute == Dtype::bf16 ? 0.05 : 1e-5) << i;
    }
  }
}

TEST_F(GptTest, TheAnglesOfPositionsGrowWithTheSequences) {
  ModelConfig config = small_model();
  config.max_position_embeddings = 3000;
  constexpr int32_t kLength = 2100;
  std::vector<int32_t> tokens(kLength), positions(kLength);
  for (int32_t i = 0; i < kLength; ++i) tokens[static_cast<size_t>(i)] = i % 11, positions[static_cast<size_t>(i)] = i;
  const auto logits = [&](Gpt& model, int64_t length) {
    return values(model.logits({.batch = 1,
                                .tokens = from_host(fast(), Dtype::i32, {length}, tokens.data()),
                                .positions = from_host(fast(), Dtype::i32, {length}, positions.data()),
                                .segment_starts = {}}));
  };
  Gpt grown(config, fast(), high_plan(config), {.gradients = false}), fresh(config, fast(), high_plan(config), {.gradients = false});
  initialize(grown.parameters(), 5);
  initialize(fresh.parameters(), 5);
  logits(grown, 3);
  EXPECT_EQ(logits(grown, kLength), logits(fresh, kLength));
  Gpt small(small_model(), fast(), high_plan(small_model()), {.gradients = false});
  initialize(small.parameters(), 5);
  EXPECT_EQ(logits(small, 8).size(), 8U * 11);
  EXPECT_THAT(error_of([&] { logits(small, 9); }).what(), ::testing::HasSubstr("rope: positions[8] is 8"));
}

TEST_F(GptTest, ACacheHoldsThePositionsItWasMadeFor) {
  Gpt model(small_model(), fast(), high_plan(small_model()), {.gradients = false});
  initialize(model.parameters(), 5);
  auto cache = model.new_cache(4);
  model.next_logits({1, 2, 3}, cache);
  model.next_logits({4}, cache);
  EXPECT_THAT(error_of([&] { model.next_logits({5}, cache); }).what(), ::testing::HasSubstr("4 + 1 tokens, the cache holds 4"));
  EXPECT_EQ(model.new_cache()[0].keys.dim(0), small_model().max_position_embeddings);
}

TEST_F(GptTest, ModulesHaveTheNamesThatRulesMatch) {
  const auto names = [](void (*set)(ModelConfig&)) {
    ModelConfig config = small_model();
    config.num_layers = 1;
    set(config);
    std::set<std::string> out;
    for (const ModuleShape& module : model_shape(config).modules) out.insert(module.path);
    return out;
  };
  const std::set<std::string> of_qwen3{"embed",
                                       "final_norm",
                                       "layers.0.attn.k_norm",
                                       "layers.0.attn.out",
                                       "layers.0.attn.q_norm",
                                       "layers.0.attn.qkv",
                                       "layers.0.attn_norm",
                                       "layers.0.mlp.down",
                                       "layers.0.mlp.gate_up",
                                       "layers.0.mlp_norm",
                                       "output"},
      of_gpt2{"embed",           "final_norm",        "layers.0.attn.out", "layers.0.attn.qkv", "layers.0.attn_norm", "layers.0.mlp.down",
              "layers.0.mlp.up", "layers.0.mlp_norm", "position"};
  EXPECT_EQ(names([](ModelConfig&) {}), of_qwen3);
  EXPECT_EQ(names(gpt2_shape), of_gpt2);
}

TEST_F(GptTest, SinksAreOneForEachHeadAndBiasesOfExpertsAreGrouped) {
  ModelConfig plain = small_model();
  with_experts(plain);
  ModelConfig config = plain;
  config.attention_sinks = config.moe->router_bias = config.moe->expert_mlp_bias = true;
  Gpt model(config, reference(), high_plan(config, Dtype::f32), {.recompute = Recompute::none, .gradients = false});
  const auto shape = [&](const char* name) {
    const Parameter* const found = model.parameters().find(text("layers.0.", name));
    return found ? found->shape : Shape{};
  };
  EXPECT_EQ(shape("attn.sinks"), (Shape{4}));
  EXPECT_FALSE(model.parameters().find("layers.0.attn.sinks")->decays());
  EXPECT_EQ(shape("moe.router.bias"), (Shape{5}));
  EXPECT_EQ(shape("moe.experts.gate_up.bias"), (Shape{5 * 12}));
  EXPECT_EQ(shape("moe.experts.down.bias"), (Shape{5 * 8}));
  // A token is computed with the 12 and 8 biases of two experts.
  EXPECT_EQ(high_plan(config).parameters() - high_plan(plain).parameters(), 2 * 4 + 5 + 5 * 20);
  EXPECT_EQ(high_plan(config).active_parameters() - high_plan(plain).active_parameters(), 2 * 4 + 5 + 2 * 20);
}

// Matrices are normal with the deviation that goes with their name; norms start at 1, biases at 0.
void expect_initial_weights(const ParameterSet& parameters, double inner_std, double residual_std) {
  for (const Parameter& parameter : parameters.all()) {
    const std::vector<double> weights = values(parameter.value());
    if (!parameter.decays() && !parameter.name.ends_with(".sinks")) {
      EXPECT_EQ(weights, std::vector<double>(weights.size(), parameter.name.ends_with(".bias") ? 0.0 : 1.0)) << parameter.name;
      continue;
    }
    const auto n = static_cast<double>(weights.size());
    const double deviation = std::sqrt(std::inner_product(weights.begin(), weights.end(), weights.begin(), 0.0) / n);
    const bool residual = parameter.name.ends_with("out.weight") || parameter.name.ends_with("down.weight");
    const double expected = residual ? residual_std : inner_std;
    // The relative standard error of a deviation over n draws is 1 / sqrt(2 n); five of them.
    EXPECT_NEAR(deviation, expected, expected * 5 / std::sqrt(2 * n)) << parameter.name;
  }
}

TEST_F(GptTest, InitialWeightsHaveTheDeviationsOfTheConfig) {
  ModelConfig scaled = small_model();
  scaled.hidden_size = 64;
  ModelConfig unscaled = scaled;
  gpt2_shape(unscaled);
  unscaled.init_residual_scale = false;
  unscaled.attention_sinks = true;
  for (const ModelConfig& config : {scaled, unscaled}) {
    Gpt model(config, reference(), high_plan(config, Dtype::f32), {.recompute = Recompute::none, .gradients = false});
    initialize(model.parameters(), 5);
    expect_initial_weights(model.parameters(), 0.3, config.init_residual_scale ? 0.3 / 2 : 0.3);  // sqrt(2 * 2 layers)
  }
}

TEST_F(GptTest, InitialWeightsFollowTheSeed) {
  Gpt model(small_model(), reference(), high_plan(small_model(), Dtype::f32), {.recompute = Recompute::none, .gradients = false});
  initialize(model.parameters(), 5);
  const std::vector<double> first = values(model.parameters().find("embed.weight")->value());
  initialize(model.parameters(), 6);
  EXPECT_NE(first, values(model.parameters().find("embed.weight")->value()));
  initialize(model.parameters(), 5);
  EXPECT_EQ(first, values(model.parameters().find("embed.weight")->value()));
}

TEST_F(GptTest, ThePlanOfAnotherModelIsRefused) {
  const PrecisionPlan plan = high_plan(small_model());
  const auto change = [&](void (*set)(ModelConfig&)) {
    ModelConfig changed = small_model();
    set(changed);
    return error_of([&] { Gpt(changed, reference(), plan, {}); });
  };
  EXPECT_EQ(change([](ModelConfig& c) { c.num_layers = 3; }).code(), ExitCode::internal);
  EXPECT_STREQ(change([](ModelConfig& c) { c.intermediate_size = 12; }).what(), "the precision plan was made for another model");
  EXPECT_STREQ(change([](ModelConfig& c) { c.attention_bias = AttentionBias::qkv; }).what(),
               "the precision plan was made for another model");
  EXPECT_STREQ(change([](ModelConfig& c) { c.tie_word_embeddings = true; }).what(), "the precision plan was made for another model");
  EXPECT_STREQ(change([](ModelConfig& c) { c.vocab_size.reset(); }).what(), "model.vocab_size is not known yet");
}

TEST_F(GptTest, TheFlopsOfGpt2AreThoseOfTheFormula) {
  ModelConfig config;
  gpt2_shape(config);
  config.vocab_size = 50257;
  config.hidden_size = 768;
  config.num_layers = 12;
  config.num_attention_heads = 12;
  config.head_dim.reset();
  config.intermediate_size = 3072;
  // Heads wider than the residual stream, and an output projection of its own: only that one is multiplied with, not the embedding.
  const double block = 32 * 8 + 8 * 16 + 20 * 8 + 8 * 10;
  EXPECT_DOUBLE_EQ(training_flops_per_token(model_shape(small_model()), 5), 6.0 * (2 * block + 11 * 8) + 6.0 * 2 * 16 * 5);
  // Rows 0 to 4 of five see 1, 2, 3, 3, 3 keys: about 3 (1 - 3 / 10) on average, in the one layer that has the window.
  ModelConfig window = small_model();
  window.sliding_window = 3, window.sliding_layers = {1};
  EXPECT_DOUBLE_EQ(training_flops_per_token(model_shape(window), 5), 6.0 * (2 * block + 11 * 8) + 6.0 * 16 * 5 + 12.0 * 16 * 3 * (1 - 0.3));
  EXPECT_DOUBLE_EQ(training_flops_per_token(model_shape(window), 3), training_flops_per_token(model_shape(small_model()), 3));
  // 12 * 12 * 768^2 block weights and the tied output; 6 * 12 * 768 * T for causal attention.
  EXPECT_DOUBLE_EQ(training_flops_per_token(model_shape(config), 64),
                   6.0 * (12 * 12 * 768.0 * 768.0 + 50257 * 768.0) + 6.0 * 12 * 768 * 64);
  // Counted are the 2 of 5 experts of 6 that a token goes to, the router, and the MLP beside them; the other layer is dense.
  ModelConfig experts = small_model();
  with_experts(experts);
  const double attention = 32 * 8 + 8 * 16, of_token = 2 * (12 * 8 + 8 * 6) + 5 * 8 + 8 * 8 + 8 * 4, dense = 20 * 8 + 8 * 10;
  EXPECT_DOUBLE_EQ(training_flops_per_token(model_shape(experts), 5), 6.0 * (2 * attention + of_token + dense + 11 * 8) + 6.0 * 2 * 16 * 5);
}

}  // namespace mantissa::test::gpt_test
