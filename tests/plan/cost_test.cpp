// The plan of a run on many ranks: the bytes it sends, and the time of a step by the formula of cost.h.
#include "plan/cost.h"

#include <gmock/gmock.h>

#include "mantissa/train/load_config.h"
#include "models/gpt.h"
#include "models/model_shape.h"
#include "nn/shards.h"
#include "optim/optimizer.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa::cost_test {

using ::testing::Each;
using ::testing::IsEmpty;

// Four layers, of which each is a bucket, between tables of other sizes; no attention to speak of.
RunConfig config_of(int64_t ranks, const std::vector<std::string>& sets = {}) {
  const nlohmann::json json = {{"model",
                                {{"vocab_size", 4096},
                                 {"hidden_size", 1024},
                                 {"num_layers", 4},
                                 {"num_attention_heads", 8},
                                 {"intermediate_size", 4096},
                                 {"max_position_embeddings", 64}}},
                               {"training", {{"seq_len", 64}, {"micro_batch_size", 2}, {"grad_accum", 3}}},
                               {"data", {{"path", "none"}}}};
  return load_run_config({.file = "c.json", .text = json.dump(), .set_files = {}, .sets = sets}, Inputs::unchecked, ranks).config;
}

StepTime time_of(const RunConfig& config, const Rates& rates) { return step_time(config, resolve_plan(config), rates); }

TEST(StepTime, OfOneRankIsItsFlopsByTheirRate) {
  const auto compute = [](const std::vector<std::string>& sets) {
    return *time_of(config_of(1, sets), {.flops = 1e9, .link = {}}).compute;
  };
  const double none = compute({}), flops = training_flops_per_token(model_shape(config_of(1).model), 64) * 64 * 6;
  EXPECT_NEAR(none, flops * 1e-9, 1e-9 * flops * 1e-9);
  EXPECT_EQ(*time_of(config_of(1), {.flops = 1e9, .link = {}}).step, none);
  EXPECT_DOUBLE_EQ(compute({"model.tie_word_embeddings=true"}), none) << "tied embeddings multiply as often";
  // The parts that are computed again: the layers, or their attention.
  const double head = 6e-9 * 4096 * 1024 * 64 * 6, attention = 6e-9 * 4 * 1024 * 64 * 64 * 6;
  EXPECT_NEAR(compute({"training.recompute=full"}), none + (none - head) / 3, 1e-9 * none);
  EXPECT_NEAR(compute({"training.recompute=selective"}), none + attention / 3, 1e-9 * none);
}

// Its forward pass alone, a third of what training it would take, before which no gathered weight is waited for.
TEST(StepTime, HasTheForwardPassOfATeacher) {
  for (const int64_t ranks : {1, 2}) {
    RunConfig config = config_of(ranks);
    const Rates rates{.flops = 1e12, .link = 1e10};
    const StepTime alone = time_of(config, rates);
    config.training.teacher = "teacher";
    config.teacher = config.model;
    const StepTime taught = time_of(config, rates);
    EXPECT_NEAR(*taught.compute, *alone.compute * 4 / 3, 1e-9 * *alone.compute);
    EXPECT_NEAR(step_flops_per_token(config), training_flops_per_token(model_shape(config.model), 64) * 4 / 3, 1.0);
    EXPECT_EQ(*taught.exchange_not_hidden, *alone.exchange_not_hidden);
    EXPECT_EQ(*taught.gather_not_hidden<*alone.gather_not_hidden, ranks> 1);
  }
}

// The gradient of a frozen weight is not computed, two of six FLOPs for each element; its forward pass takes as long.
TEST(StepTime, LacksTheWeightGradientsOfFrozenModules) {
  const std::string mlps = R"(optimizer.rules=[{"match": "layers.*.mlp.*", "lr_factor": 0}])",
                    table = R"(optimizer.rules=[{"match": "embed", "lr_factor": 0}])";
  const auto compute = [](const std::vector<std::string>& sets) {
    return *time_of(config_of(1, sets), {.flops = 1e9, .link = {}}).compute;
  };
  constexpr double kTokens = 64 * 6, kMlps = 4 * 3 * 4096.0 * 1024, kTable = 4096.0 * 1024;
  const double all = compute({});
  EXPECT_NEAR(compute({mlps}), all - 2e-9 * kMlps * kTokens, 1e-9 * all);
  EXPECT_EQ(compute({table}), all) << "a table is read";
  EXPECT_NEAR(compute({table, "model.tie_word_embeddings=true"}), all - 2e-9 * kTable * kTokens, 1e-9 * all) << "it is the output, too";
  // The rank that owns all of the first bucket that is trained, 16.8 MB, sends it. Then layer 0 takes 4.3 ms, in which the 3.7 ms of layer
  // 1 are hidden, as those of the others are.
  const Rates rates{.flops = 1e12, .link = 4.5e9};
  const StepTime time = time_of(config_of(2, {R"(optimizer.rules=[{"match": "layers.0.mlp.*", "lr_factor": 0}])"}), rates);
  const double first = 2 * (4096.0 * 1024 + 4 * 1024 * 1024) / 4.5e9;
  EXPECT_NEAR(*time.gather_not_hidden, first, 0.02 * first);
}

TEST(RunWarnings, SayThatAModelHasNothingToLearnFromItself) {
  const auto warned = [](const std::vector<std::string>& sets) {
    RunConfig config = config_of(1, sets);
    config.training.teacher = "self";
    const std::vector<std::string> warnings = run_warnings(config, resolve_plan(config));
    return std::ranges::any_of(warnings, [](const auto& line) { return line.find("there is nothing to learn") != std::string::npos; });
  };
  EXPECT_TRUE(warned({}));
  EXPECT_FALSE(warned({"precision.recipe=mxfp8"}));
  EXPECT_FALSE(warned({"model.moe.num_experts=4", "model.moe.intermediate_size=64"})) << "routers learn from their losses";
  RunConfig labels = config_of(1);
  labels.training.teacher = "self", labels.training.teacher_weight = 0.5;
  for (const std::string& line : run_warnings(labels, resolve_plan(labels))) EXPECT_EQ(line.find("nothing to learn"), std::string::npos);
}

TEST(StepTime, WithoutARateIsNotInvented) {
  const RunConfig config = config_of(4);
  const StepTime nothing = time_of(config, {}), computes = time_of(config, {.flops = 1e12, .link = {}}),
                 sends = time_of(config, {.flops = {}, .link = 1e9});
  EXPECT_FALSE(nothing.compute || nothing.exchange || nothing.gather || nothing.step);
  EXPECT_TRUE(computes.compute);
  EXPECT_FALSE(computes.exchange || computes.gather || computes.exchange_not_hidden || computes.step);
  EXPECT_TRUE(sends.exchange && sends.gather);
  EXPECT_FALSE(sends.compute || sends.exchange_not_hidden || sends.gather_not_hidden || sends.step);
}

// Tensor ranks have their share of the GEMMs, and hide nothing.
TEST(StepTime, OfTensorRanksHasTheirActivations) {
  const RunConfig alone = config_of(1), together = config_of(4, {"parallel.tensor=2"});
  const Rates rates{.flops = 1e9, .link = 1e9};
  const StepTime time = time_of(together, rates);
  EXPECT_DOUBLE_EQ(*time.compute, *time_of(alone, rates).compute / 2);
  // For 128 tokens: the table's rows and in each layer four sums, of fp32 but for the table, half of each sent twice by each of two ranks;
  // two numbers of each row; the gradient of the last hidden state.
  const double micro = 128.0 * (1024 * 2 + 4 * 4 * 1024 * 4 + 8 + 1024 * 4);
  EXPECT_NEAR(*time.activations, 3 * micro / 1e9, 1e-12);
  EXPECT_EQ(*time.exchange_not_hidden, *time.exchange);
  EXPECT_EQ(*time.gather_not_hidden, *time.gather);
  EXPECT_DOUBLE_EQ(*time.step, *time.compute + *time.activations + *time.exchange + *time.gather);
  EXPECT_EQ(*time_of(alone, rates).activations, 0.0);
  const StepTime computes = time_of(together, {.flops = 1e9, .link = {}});
  EXPECT_FALSE(computes.activations || computes.step);
}

TEST(StepTime, OfALinkThatIsFastIsThatOfTheFirstBucket) {
  const RunConfig config = config_of(2);
  const StepTime time = time_of(config, {.flops = 1e9, .link = 1e12});
  // Backward ends with the embedding and layer 0, and the first forward begins with them.
  const double half = (4096.0 * 1024 + 4 * 1024 * 1024 + 3 * 4096 * 1024) / 2 / 1e12;
  EXPECT_NEAR(*time.exchange_not_hidden, 4 * half, 0.02 * 4 * half);
  EXPECT_NEAR(*time.gather_not_hidden, 2 * half, 0.02 * 2 * half);
  EXPECT_NEAR(*time.step, *time.compute + *time.exchange_not_hidden + *time.gather_not_hidden, 1e-9);
}

TEST(StepTime, OfALinkThatIsSlowIsTheSumOfItsTransfers) {
  const RunConfig config = config_of(2);
  const StepTime time = time_of(config, {.flops = 1e15, .link = 1e6});
  const auto parameters = static_cast<double>(resolve_plan(config).parameters());
  EXPECT_NEAR(*time.exchange, 4 * parameters / 2 / 1e6, 0.01 * *time.exchange);
  EXPECT_NEAR(*time.gather, 2 * parameters / 2 / 1e6, 0.01 * *time.gather);
  EXPECT_GT(*time.exchange_not_hidden, 0.999 * *time.exchange);
  EXPECT_LE(*time.exchange_not_hidden, *time.exchange);
  EXPECT_GT(*time.gather_not_hidden, 0.999 * *time.gather);
  EXPECT_LE(*time.gather_not_hidden, *time.gather);
}

// The result lies between the two: all buckets but the last to be computed are exchanged behind backward only where backward is as long.
TEST(StepTime, HidesAsMuchAsOneMicroBatchHasRoomFor) {
  const RunConfig config = config_of(2);
  const Layout layout(parameter_specs(resolve_plan(config)), Shards::bucket_bytes(2));
  ASSERT_GE(layout.buckets().size(), 5U);
  double before = 0.0;
  for (const double link : {1e8, 1e9, 1e10, 1e11}) {
    const StepTime time = time_of(config, {.flops = 1e12, .link = link});
    const double hidden = *time.exchange - *time.exchange_not_hidden, backward = *time.compute / 3 * 2 / 3;
    EXPECT_GE(hidden, 0.0) << link;
    EXPECT_LE(hidden, backward) << link;
    EXPECT_GE(hidden / *time.exchange, before - 1e-9) << link;
    before = hidden / *time.exchange;
  }
  EXPECT_NEAR(before, 1.0 - 20971520.0 / static_cast<double>(resolve_plan(config).parameters()), 0.01);  // all but the first bucket
}

// A rank that owns a row block receives it from all others, however many they are.
TEST(StepTime, GrowsWithRanksThatOwnNothing) {
  const double few = *time_of(config_of(16), {.flops = {}, .link = 1e9}).exchange;
  const double many = *time_of(config_of(16384), {.flops = {}, .link = 1e9}).exchange;
  EXPECT_GT(many, 8 * few);
}

TEST(GatherBytes, AreThoseOfCodesWithTheirScalesAndOfValues) {
  const auto bytes = [](const std::vector<std::string>& sets) {
    const RunConfig config = config_of(2, sets);
    return gather_bytes(config, resolve_plan(config));
  };
  EXPECT_EQ(bytes({}).codes, 0.0);
  EXPECT_NEAR(bytes({}).values, 2.0, 1e-3);
  EXPECT_NEAR(bytes({"precision.dtype=fp32"}).values, 4.0, 1e-3);
  const std::string rows = R"(precision.recipes={"rows":{"base":"mxfp8","weight":{"block":[1,32]}}})";
  EXPECT_NEAR(bytes({"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}).codes, 1.0 + 1.0 / 1024, 1e-6);
  EXPECT_NEAR(bytes({rows, "precision.recipe=rows", "precision.fp8_param_gather=true"}).codes, 1.0 + 1.0 / 32, 1e-6);
  EXPECT_EQ(bytes({"precision.recipe=mxfp8"}).codes, 0.0);
  const std::string frozen = R"(optimizer.rules=[{"match": "layers.{0,1}.*", "lr_factor": 0}])";
  EXPECT_NEAR(bytes({"precision.recipe=mxfp8", "precision.fp8_param_gather=true", frozen}).codes, 1.0 + 1.0 / 1024, 1e-6);
}

// Expects the parameter specs of each rank of `ranks` that share every weight.
void expect_specs_of_the_model(const std::vector<std::string>& sets, int ranks, bool sequence) {
  std::vector<std::string> all = sets;
  for (const char* set : {"model.hidden_size=128", "model.num_attention_heads=2", "model.intermediate_size=256", "model.vocab_size=75"})
    all.emplace_back(set);
  all.push_back(text("parallel.tensor=", ranks));
  all.push_back(text("parallel.sequence_parallel=", sequence ? "true" : "false"));
  const RunConfig config = config_of(ranks, all);
  const PrecisionPlan plan = resolve_plan(config);
  const auto errors = test::run_ranks(ranks, [&](const Communicator& group) {
    const auto device = make_backend("cpu");
    const Mesh mesh = make_mesh(group, config.parallel.ranks());
    Gpt model(config.model, *device, plan, {.gradients = false, .mesh = mesh});
    const std::vector<ParameterSpec> specs = parameter_specs(plan, mesh.ranks());
    const auto all_of = [](const ParameterSpec& of) {
      return std::tuple(of.name, of.shape, of.dtype, of.quantized, of.keeps_value, of.partial_gradient);
    };
    std::vector<decltype(all_of(specs.front()))> planned, built;
    std::ranges::transform(specs, std::back_inserter(planned), all_of);
    std::ranges::transform(model.parameters().all(), std::back_inserter(built), all_of);
    EXPECT_EQ(planned, built);
    int64_t bytes = 0;
    for (const Parameter& parameter : model.parameters().all()) {
      bytes += (parameter.keeps_value ? parameter.value().bytes() : 0) + (parameter.quantized ? parameter.codes().bytes() : 0);
    }
    EXPECT_EQ(plan.bytes_on_rank({.tensor = ranks}), bytes);
    EXPECT_TRUE(ranks > 1 || plan.bytes() == bytes);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

// The resident bytes, too, are those that the plan counts.
TEST(ParameterSpecs, AreThoseOfTheModel) {
  for (const std::string& preset : preset_names()) {
    expect_specs_of_the_model({"precision.recipe=" + preset}, 1, false);
    if (preset_recipe(preset).reads_only_weight_codes())
      expect_specs_of_the_model({"precision.recipe=" + preset, "precision.fp8_param_gather=true"}, 1, false);
  }
  for (const std::vector<std::string>& sets :
       {std::vector<std::string>{"precision.recipe=mxfp8", "precision.fp8_param_gather=true", "model.pad_vocab_to=32"},
        {"model.tie_word_embeddings=true", "model.position=learned", "model.norm=layer", "model.norm_bias=true", "model.mlp_bias=true",
         "model.attention_bias=all", "model.qk_norm=false", "model.activation=gelu_tanh", "precision.recipe=mxfp4_qat",
         "precision.dtype=fp32"},
        {"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=64",
         "model.moe.shared_intermediate_size=64"}}) {
    expect_specs_of_the_model(sets, 1, false);
    expect_specs_of_the_model(sets, 2, false);
    expect_specs_of_the_model(sets, 2, true);
  }
}

// ---- what ranks hold

TEST(Estimate, OfAnExchangeIsWhatTheOthersSendOfTheLargestShare) {
  const RunConfig config = config_of(4);
  const PrecisionPlan plan = resolve_plan(config);
  const MemoryEstimate memory = estimate_memory(config, plan);
  // The first bucket, of the embedding and layers 0 and 1, is the largest; its shares differ by less than a row block.
  const double share = 4 * 33563648.0 / 4;
  EXPECT_NEAR(static_cast<double>(memory.exchange), 3 * share, 3 * 4.0 * 32 * 4096);
  EXPECT_EQ(estimate_memory(config_of(1), plan).exchange, 0);
}

TEST(Estimate, CountsTheProgramOnceAndTheTransportOfRanksOfAnyKind) {
  const auto program = [](int64_t ranks, const std::vector<std::string>& sets) {
    const RunConfig config = config_of(ranks, sets);
    return estimate_memory(config, resolve_plan(config)).program >> 20;
  };
  EXPECT_EQ((std::vector{program(1, {}), program(2, {}), program(2, {"parallel.tensor=2"})}), (std::vector<int64_t>{28, 38, 38}));
}

// A chunk of 2^26 logits of a rank is 128 rows of its half of the vocabulary, and each costs a call. Beside a teacher's it has half as
// many.
TEST(StepBytes, ChunksOfTheLossAreThoseOfARanksShareOfTheVocabulary) {
  const auto control = [](int64_t sequences, bool taught) {
    RunConfig config = config_of(2, {"parallel.tensor=2", "model.vocab_size=1048576", text("training.micro_batch_size=", sequences)});
    if (taught) config.training.teacher = "teacher", config.teacher = config.model;
    return step_bytes(config, resolve_plan(config)).sent.control;
  };
  constexpr int64_t kMicroBatches = 3, kRanks = 2;
  EXPECT_EQ(control(4, false) - control(2, false), kMicroBatches * kRanks * kHeaderBytes) << "two chunks instead of one";
  EXPECT_EQ(control(4, true) - control(2, true), 2 * kMicroBatches * kRanks * kHeaderBytes) << "four instead of two";
}

TEST(Estimate, CountsTheBiasesByWhichRoutersChoose) {
  const auto values = [](const std::vector<std::string>& more) {
    std::vector<std::string> sets = {"model.moe.num_experts=6", "model.moe.intermediate_size=64", "model.moe.score=sigmoid"};
    sets.insert(sets.end(), more.begin(), more.end());
    const RunConfig config = config_of(1, sets);
    return estimate_memory(config, resolve_plan(config)).values;
  };
  EXPECT_EQ(values({"model.moe.bias_update_rate=1e-3"}) - values({}), 4 * 6 * 4) << "fp32, of six experts in each of four layers";
}

// Ranks divide the matrices of a grouped weight and with them their biases, which tensor ranks divide only with the rows.
TEST(Cost, RanksHoldTheirShareOfAGroupedWeightWithItsBiases) {
  const ModuleShape rows{.path = "up",
                         .out = 64,
                         .in = 32,
                         .bias = 4 * 64,
                         .parts = {{"gate", 32}, {"up", 32}},
                         .split = Split::column_parallel,
                         .experts = true,
                         .matrices = 4};
  const ModuleShape share = rows.on_rank({.tensor = 2, .expert = 2});
  EXPECT_EQ(share.matrices, 2);
  EXPECT_EQ(share.out, 32);
  EXPECT_EQ(share.in, 32);
  EXPECT_EQ(share.bias, 2 * 32);
  EXPECT_EQ(share.parts[1].out, 16);
  EXPECT_EQ(rows.on_rank({.tensor = 1, .expert = 4}).bias, 64);
  const ModuleShape columns{
      .path = "down", .out = 64, .in = 32, .bias = 4 * 64, .split = Split::row_parallel, .experts = true, .matrices = 4};
  EXPECT_EQ(columns.on_rank({.tensor = 2, .expert = 2}).bias, 2 * 64);
  EXPECT_EQ(columns.on_rank({.tensor = 2, .expert = 2}).in, 16);
  const ModuleShape one{.path = "router", .out = 4, .in = 32, .bias = 4};
  EXPECT_EQ(one.on_rank({.tensor = 2, .expert = 2}), one);
}

}  // namespace mantissa::cost_test
