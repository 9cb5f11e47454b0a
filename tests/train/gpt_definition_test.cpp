// A training step of the model against plain_gpt.h: on the reference, where the gradient is held against the definition too, and on the
// fast backend. Documents end inside the sequences, and each micro batch has its own.
#include "plain_gpt.h"
#include "train/training_step.h"

namespace mantissa::test::gpt_definition_test {

struct Shaped {
  const char* name;
  std::function<void(ModelConfig&)> set;
};
void PrintTo(const Shaped& shaped, std::ostream* out) { *out << shaped.name; }

// Odd sizes: heads of three pairs, groups of three query heads, a vocabulary of 11 in 16 rows.
ModelConfig odd_model() {
  ModelConfig config;
  config.vocab_size = 11;
  config.pad_vocab_to = 16;
  config.hidden_size = 10;
  config.num_layers = 2;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 6;
  config.intermediate_size = 7;
  config.max_position_embeddings = 9;
  config.norm_eps = 0.05;
  config.rope_theta = 50;
  config.init_std = 0.4;
  return config;
}

void layer_norm_and_biases(ModelConfig& config) {
  config.norm = Norm::layer;
  config.norm_bias = config.mlp_bias = true;
  config.attention_bias = AttentionBias::all;
  config.position = Position::learned;
  config.qk_norm = false;
}

// Adds auxiliary losses that weigh as much as the loss.
MoeConfig experts(MoeConfig moe) {
  moe.aux_loss_coef = 0.7;
  moe.seq_aux_loss_coef = 0.4;
  moe.z_loss_coef = 0.3;
  return moe;
}

const std::vector<Shaped> kShapes = {
    {"qwen3", [](ModelConfig&) {}},
    {"qwen2", [](ModelConfig& c) { c.qk_norm = false, c.attention_bias = AttentionBias::qkv; }},
    {"gpt2", [](ModelConfig& c) { layer_norm_and_biases(c), c.activation = Activation::gelu_tanh, c.tie_word_embeddings = true; }},
    {"llama3",
     [](ModelConfig& c) {
       c.qk_norm = false, c.rope_scaling = {.type = RopeScaling::llama3, .factor = 3, .original_max_position_embeddings = 20};
     }},
    {"yarn",
     [](ModelConfig& c) {
       c.rope_scaling = {.type = RopeScaling::yarn, .factor = 5, .original_max_position_embeddings = 30}, c.rope_scaling->beta_fast = 4,
       c.rope_scaling->beta_slow = 0.25, c.rope_scaling->truncate = false;
     }},
    {"mistral", [](ModelConfig& c) { c.sliding_window = 3; }},
    {"alternating_windows", [](ModelConfig& c) { c.sliding_window = 2, c.sliding_layers = {0}; }},
    {"sinks", [](ModelConfig& c) { c.attention_sinks = true, c.sliding_window = 4, c.sliding_layers = {1}; }},
    {"mixtral", [](ModelConfig& c) { c.moe = experts({.num_experts = 5, .num_experts_per_tok = 2, .intermediate_size = 3}); }},
    {"qwen3_moe",
     [](ModelConfig& c) {
       c.moe = experts({.num_experts = 4, .num_experts_per_tok = 4, .intermediate_size = 5, .norm_topk_prob = false}),
       c.moe->dense_layers = {0};
     }},
    {"clamped",
     [](ModelConfig& c) {
       c.activation = Activation::swiglu_clamped;
       c.swiglu_limit = 0.65;  // no value is so near that the slope below would cross it
     }},
    {"gpt_oss",
     [](ModelConfig& c) {
       c.activation = Activation::swiglu_clamped, c.attention_bias = AttentionBias::all, c.attention_sinks = true, c.sliding_window = 3,
       c.sliding_layers = {0}, c.qk_norm = false,
       c.moe = experts({.num_experts = 7,
                        .num_experts_per_tok = 3,
                        .intermediate_size = 2,
                        .softmax_after_topk = true,
                        .router_bias = true,
                        .expert_mlp_bias = true});
     }},
    {"switch_transformer",
     [](ModelConfig& c) {
       c.moe = experts({.num_experts = 3, .num_experts_per_tok = 1, .intermediate_size = 6, .norm_topk_prob = false});
     }},
    {"deepseek",
     [](ModelConfig& c) {
       c.moe = experts({.num_experts = 6,
                        .num_experts_per_tok = 2,
                        .intermediate_size = 4,
                        .shared_intermediate_size = 3,
                        .score = RouterScore::sigmoid,
                        .routed_scaling_factor = 2.5,
                        .n_group = 3,
                        .topk_group = 2});
     }},
    {"nanogpt", [](ModelConfig& c) { layer_norm_and_biases(c), c.activation = Activation::gelu_erf; }}};

// Four sequences of nine tokens. The first is one document; in the others documents end anywhere. Positions count from the start of the
// document.
Batch documents() {
  Batch batch;
  batch.sequences = 4;
  batch.length = 9;
  for (int64_t row = 0; row < batch.sequences; ++row) {
    int64_t start = 0;
    for (int64_t t = 0; t < batch.length; ++t) {
      const auto draw = random_words({.seed = 7}, 31, static_cast<uint64_t>(row * batch.length + t));
      if (row > 0 && draw[0] % 3 == 0) start = t;
      batch.tokens.push_back(static_cast<int32_t>(draw[1] % 11));
      batch.targets.push_back(draw[2] % 5 == 0 ? kNoTarget : static_cast<int32_t>(draw[3] % 11));
      batch.positions.push_back(static_cast<int32_t>(t - start));
      batch.segment_starts.push_back(static_cast<int32_t>(start));
      batch.target_count += batch.targets.back() == kNoTarget ? 0 : 1;
    }
  }
  return batch;
}

struct Tolerance {
  double loss, gradient;  // relative
};

class GptDefinition : public BackendTest, public ::testing::WithParamInterface<Shaped> {
 protected:
  // One step, a sequence a micro batch.
  void expect_step(Backend& device, Dtype compute, Recompute recompute, Tolerance tolerance) const {
    SCOPED_TRACE(text(device.name(), ", recompute ", choice_name(recompute)));
    ModelConfig config = odd_model();
    GetParam().set(config);
    Gpt model(config, device, high_plan(config, compute), {.recompute = recompute, .gradients = true, .micro_batches = 4});
    initialize(model.parameters(), 5);
    draw_vectors(model.parameters());
    const PlainGpt definition(config, model.parameters());
    Optimizer optimizer(model.parameters(), {});
    const Batch batch = documents();
    GradientAccumulator accumulator(model.parameters(), Accumulation::running, batch.sequences);
    const StepResult result = training_step(model, optimizer, accumulator, batch, 1, 1e-3);
    EXPECT_NEAR(result.loss, definition.loss(batch), tolerance.loss * result.loss);
    // The slope of the loss along its gradient g is |g|^2.
    const double squared = result.gradient_norm * result.gradient_norm, distance = 1e-4 / result.gradient_norm;
    const double above = definition.moved(model.parameters(), distance).objective(batch),
                 below = definition.moved(model.parameters(), -distance).objective(batch);
    EXPECT_NEAR((above - below) / (2 * distance), squared, tolerance.gradient * squared);
  }
};

TEST_P(GptDefinition, GivesLossAndGradientOfAStep) {
  expect_step(reference(), Dtype::f64, Recompute::none, {.loss = 1e-7, .gradient = 1e-6});  // the table of the rotations is fp32
  for (const Recompute recompute : {Recompute::selective, Recompute::full})
    expect_step(fast(), Dtype::f32, recompute, {.loss = 1e-6, .gradient = 1e-5});
}

INSTANTIATE_TEST_SUITE_P(, GptDefinition, ::testing::ValuesIn(kShapes), [](const auto& param) { return std::string(param.param.name); });

}  // namespace mantissa::test::gpt_definition_test
