// Mixtures of experts in training runs: the meaning of each recipe of the experts' weights, and sizes at the edge.
#include <gmock/gmock.h>

#include <cmath>

#include "checkpoint/checkpoint_diff.h"
#include "hf/load_model.h"
#include "mantissa/backend/functions.h"
#include "metrics/run_metrics.h"
#include "thread_ranks.h"
#include "train/generate.h"
#include "train/training_step.h"
#include "training.h"

namespace mantissa::experts_test {

using test::TrainedRun;
using ::testing::HasSubstr;

class Experts : public test::TrainingTest {
 protected:
  // Two layers of 5 experts; 64 channels, experts of 32.
  static std::vector<std::string> sets(std::vector<std::string> more) {
    std::vector<std::string> out = {"precision.dtype=bf16",        "model.hidden_size=64",           "model.intermediate_size=96",
                                    "model.moe.num_experts=5",     "model.moe.intermediate_size=32", "model.moe.num_experts_per_tok=2",
                                    "model.moe.aux_loss_coef=0.01"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  TrainedRun run_experts(const std::string& name, std::vector<std::string> more) const { return run(name, sets(std::move(more))); }
};

const char* const kQatOfExperts = R"(precision.rules=[{"match":"layers.*.moe.experts.*","recipe":"mxfp4_qat"}])";

// A model, and the parts that train it by training_step().
struct Trained {
  Trained(const RunConfig& config, Backend& device)
      : model(config.model, device, resolve_plan(config), training_options(config, {})),
        optimizer(model.parameters(), config.optimizer),
        accumulator(model.parameters(), Accumulation::running, 1) {
    optimizer.initialize(1);
  }
  Gpt model;
  Optimizer optimizer;
  GradientAccumulator accumulator;
};

// Writes masters, rounded to bf16 and fake-quantized, in place of the values that forward reads.
void round_values_of_experts(Trained& run, const Quantization& how) {
  for (const Optimizer::State& state : run.optimizer.states()) {
    const Parameter& parameter = *state.shard.of;
    if (parameter.name.find(".moe.experts.") == std::string::npos) continue;
    const Tensor rounded = converted(state.master, Dtype::bf16);
    rounded.device().run(FakeQuantize{.x = rounded, .out = state.shard.of_rows(parameter.value()), .how = how});
  }
}

TEST_F(Experts, UnderQatAreTrainedAsIfTheirValuesWereRounded) {
  const auto configured = [&](const std::vector<std::string>& more) {
    RunConfig config = this->config("qat", sets(more)).config;
    config.model.vocab_size = 8;
    return config;
  };
  const auto device = make_backend("cpu");
  Trained qat(configured({kQatOfExperts}), *device), high(configured({}), *device);
  const Quantization how{.format = Format::e2m1, .block_rows = 1, .block_cols = 32, .rule = ScaleRule::flashinfer};
  const LoadedConfig data_config = config("data");
  Data data = open_data(data_config.config.data, {.seq_len = 16});
  for (int64_t step = 0; step < 4; ++step) {
    const Batch batch = data.train->batch(8 * step, 8);
    round_values_of_experts(high, how);
    const StepResult a = training_step(qat.model, qat.optimizer, qat.accumulator, batch, 8, 1e-2),
                     b = training_step(high.model, high.optimizer, high.accumulator, batch, 8, 1e-2, {.routers = RouterFigures::counts});
    EXPECT_EQ(a.loss, b.loss) << step;
    EXPECT_EQ(a.gradient_norm, b.gradient_norm) << step;
    EXPECT_EQ(a.routers, RouterFigures::counts_and_losses);
    EXPECT_EQ(b.routers, RouterFigures::counts);
    const size_t layers = 2, width = static_cast<size_t>(configured({}).model.moe->num_experts + RouterStatistics::kLosses);
    EXPECT_EQ(a.figures.size(), layers * width);
    EXPECT_EQ(b.figures.size(), a.figures.size());
  }
  for (size_t i = 0; i < qat.optimizer.states().size(); ++i) {
    EXPECT_TRUE(test::same_elements(to_host<float>(qat.optimizer.states()[i].master), to_host<float>(high.optimizer.states()[i].master)))
        << qat.optimizer.states()[i].shard.of->name;
  }
}

// Values that are computed again have the bits of those that were kept.
TEST_F(Experts, LearnTheSameWhateverIsRecomputedAndGathered) {
  for (const std::string recipe : {"high", "mxfp8", "mxfp4_qat_mxfp8_act"}) {
    const std::string set = "precision.recipe=" + recipe, steps = "training.steps=5";
    run_experts(recipe, {set, steps});
    for (const std::string more : {"training.recompute=selective", "training.recompute=full", "precision.fp8_param_gather=true"}) {
      if (more.starts_with("precision") && recipe != "mxfp8") continue;
      run_experts(recipe + more, {set, steps, more});
      EXPECT_TRUE(state_of(recipe + more, 5) == state_of(recipe, 5)) << recipe << more;
    }
  }
}

// The columnwise codes of down's output gradient alone are others where rows move as values instead of codes.
TEST_F(Experts, ReadTheSameCodesWhetherCodesMoveOrValues) {
  const auto with = [&](const std::string& name, const char* dispatch) {
    return run_experts(name, {"precision.recipe=mxfp8", "training.steps=1", "optimizer.grad_clip=0", "model.init_std=0.2",
                              text("precision.quantized_dispatch=", dispatch)});
  };
  EXPECT_TRUE(test::same_elements(with("codes", "true").losses, with("values", "false").losses));
  for (const std::string& name : parameters("codes", 1)) {
    const std::vector<float> a = tensor("codes", 1, "m." + name), b = tensor("values", 1, "m." + name);
    if (!name.ends_with("experts.down.weight")) {
      EXPECT_EQ(a, b) << name;
      continue;
    }
    double squares = 0.0, difference = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
      squares += double{b[i]} * double{b[i]};
      difference += (double{a[i]} - double{b[i]}) * (double{a[i]} - double{b[i]});
    }
    EXPECT_LE(std::sqrt(difference / squares), 0.01) << name;
  }
}

TEST_F(Experts, TellWhatTheirRoutersDid) {
  const TrainedRun dropping = run_experts("dropping", {"model.moe.capacity_factor=0.5", "training.steps=2"});
  for (const StepEvent& step : dropping.steps) {
    ASSERT_EQ(step.routing.size(), 2U);
    for (const LayerRouting& layer : step.routing) {
      EXPECT_EQ(std::accumulate(layer.load.begin(), layer.load.end(), int64_t{0}), 8 * 16 * 2) << "two experts for each token of a step";
      EXPECT_GE(layer.dropped, 0.45) << "each of 5 experts takes 13 of 128 assignments of a micro batch";
      EXPECT_GE(layer.imbalance, 1.0);
      EXPECT_GT(layer.z_loss.value(), 0.0);
    }
  }
  const TrainedRun again = run_experts("again", {"training.recompute=full", "training.steps=1"});
  for (const LayerRouting& layer : again.steps.front().routing)
    EXPECT_EQ(std::accumulate(layer.load.begin(), layer.load.end(), int64_t{0}), 8 * 16 * 2) << "what is computed again counts once";
  const TrainedRun forced = run_experts("forced", {"model.moe.force_balance=true", "model.moe.num_experts=4", "training.steps=1"});
  for (const LayerRouting& layer : forced.steps.front().routing) {
    EXPECT_EQ(layer.load, std::vector<int64_t>(4, 64));
    EXPECT_EQ(layer.imbalance, 1.0);
    EXPECT_EQ(layer.dropped, 0.0);
    EXPECT_NEAR(layer.balance_loss.value(), 1.0, 1e-6) << "the mean probabilities sum to 1, whatever they are";
  }
}

// The loss of a sequence is the balance loss of a micro batch of that sequence alone. Layers keep their numbers beside dense ones.
TEST_F(Experts, TellTheLossesOfRoutersByTheirValues) {
  const auto first_step = [&](int64_t sequences) {
    const TrainedRun run =
        run_experts(text("by", sequences), {"training.steps=1", "model.num_layers=3", "model.moe.dense_layers=[1]", "model.init_std=0.3",
                                            text("training.micro_batch_size=", sequences), text("training.grad_accum=", 8 / sequences)});
    return run.steps.at(0).routing;
  };
  const std::vector<LayerRouting> four = first_step(4), single = first_step(1);
  ASSERT_EQ(four.size(), 2U);
  ASSERT_EQ(single.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(four[i].layer, i == 0 ? 0 : 2);
    EXPECT_NEAR(four[i].sequence_balance_loss.value(), single[i].balance_loss.value(), 1e-5);
    EXPECT_NEAR(single[i].sequence_balance_loss.value(), single[i].balance_loss.value(), 1e-5);
    EXPECT_GT(four[i].sequence_balance_loss.value(), four[i].balance_loss.value() + 1e-3) << "a batch is more even than its sequences";
    EXPECT_NEAR(four[i].z_loss.value(), single[i].z_loss.value(), 1e-5);
  }
}

// Losses of routers take a pass of their own, which steps that nobody is told of do without. One that is told of only because it was
// skipped has counts.
TEST_F(Experts, MeasureLossesOfRoutersWhereTheyAreTold) {
  const auto expect_losses_at = [&](const std::string& name, std::vector<std::string> more, const std::vector<int64_t>& expected) {
    const TrainedRun run = run_experts(name, std::move(more));
    std::vector<int64_t> with_losses;
    for (const StepEvent& step : run.steps) {
      for (const LayerRouting& layer : step.routing) {
        EXPECT_EQ(std::accumulate(layer.load.begin(), layer.load.end(), int64_t{0}), 8 * 16 * 2) << step.step;
        const bool reported = layer.balance_loss.has_value();
        EXPECT_EQ(layer.z_loss.has_value(), reported);
        EXPECT_EQ(layer.sequence_balance_loss.has_value(), reported);
        if (!reported || name == "skips") continue;  // after a step of 1e38 they are anything
        // Early on five experts are chosen about alike, with logits about 0.
        EXPECT_NEAR(*layer.balance_loss, 1.0, 0.5);
        EXPECT_NEAR(*layer.sequence_balance_loss, 1.0, 0.5);
        EXPECT_NEAR(*layer.z_loss, std::log(5.0) * std::log(5.0), 0.5);
      }
      if (step.routing.at(0).balance_loss) with_losses.push_back(step.step);
    }
    EXPECT_EQ(with_losses, expected) << name;
    EXPECT_EQ(read_run_metrics(run_folder(name)).imbalance.size(), run.steps.size());
    return run.steps.size();
  };
  EXPECT_EQ(expect_losses_at("interval", {"logging.interval=3", "training.steps=5"}, {1, 3, 5}), 3U);
  const std::vector<std::string> measured = {"logging.interval=3", "training.steps=5", "precision.recipe=mxfp8",
                                             "precision.report_interval=2"};
  EXPECT_EQ(expect_losses_at("measured", measured, {1, 2, 3, 4, 5}), 5U);
  const std::vector<std::string> skips = {"logging.interval=3",         "training.steps=4",       "optimizer.lr=1e38",
                                          "training.nonfinite_limit=9", "schedule.type=constant", "schedule.warmup_steps=0"};
  EXPECT_GT(expect_losses_at("skips", skips, {1, 3, 4}), 3U) << "step 2 is skipped";
}

TEST_F(Experts, TakeTheirShareOfTokensTimesTheFactorRoundedUp) {
  MoeConfig moe;
  moe.num_experts = 5;
  EXPECT_EQ(moe.capacity(64), 0) << "all";
  moe.capacity_factor = 0.5;
  EXPECT_EQ(moe.capacity(64), 13) << "64 * 2 / 5 / 2 = 12.8";
  EXPECT_EQ(moe.capacity(1), 1);
  moe.capacity_factor = 1e300;
  EXPECT_EQ(moe.capacity(64), 64);
}

// The cases have blocks of 32 before blocks of 128 and the reverse, and GEMMs of which only some read codes: rows are padded for both, and
// the high-precision values that wgrad reads are there.
TEST_F(Experts, MayHaveAnotherRecipeInEachGemm) {
  const std::string recipes =
      R"(precision.recipes={"forward":{"base":"mxfp8","gemms":["fprop"]},"back":{"base":"mxfp8","gemms":["dgrad","wgrad"]}})";
  for (const auto& [up, down] : {std::pair<std::string, std::string>{"mxfp8", "fp8_block"},
                                 {"fp8_block", "mxfp8"},
                                 {"forward", "back"},
                                 {"back", "forward"},
                                 {"back", "back"},
                                 {"forward", "forward"},
                                 {"high", "back"},
                                 {"fp8_block", "high"},
                                 {"forward", "fp8_block"}}) {
    const auto with = [&](const std::string& dispatch) {
      const std::string rules = R"(precision.rules=[{"match":"layers.*.experts.gate_up","recipe":")" + up +
                                R"("},{"match":"layers.*.experts.down","recipe":")" + down + R"("}])";
      return run_experts(up + down + dispatch, {recipes, rules, "model.hidden_size=128", "model.moe.intermediate_size=128",
                                                "training.steps=2", "precision.quantized_dispatch=" + dispatch});
    };
    const TrainedRun codes = with("true"), values = with("false");
    EXPECT_EQ(codes.losses[0], values.losses[0]) << up << ' ' << down;
    EXPECT_NEAR(codes.losses[1], values.losses[1], 0.02 * values.losses[1]) << up << ' ' << down;
    EXPECT_FALSE(codes.steps[1].skipped) << up << ' ' << down;
  }
}

// 16 tokens for 128 experts; a single expert; experts that most tokens never reach.
TEST_F(Experts, TrainSaveResumeAndGenerateAtTheEdge) {
  const std::vector<std::vector<std::string>> edges = {
      {"model.moe.num_experts=128", "model.moe.num_experts_per_tok=8", "training.micro_batch_size=1", "training.grad_accum=1"},
      {"model.moe.num_experts=1", "model.moe.num_experts_per_tok=1"},
      {"model.moe.num_experts=40", "model.moe.num_experts_per_tok=1", "training.micro_batch_size=1", "training.grad_accum=1"},
      {"model.moe.num_experts=6", "model.moe.num_experts_per_tok=6", "model.moe.score=sigmoid", "model.moe.n_group=3",
       "model.moe.topk_group=3", "model.moe.shared_intermediate_size=32"}};
  for (size_t i = 0; i < edges.size(); ++i) {
    std::vector<std::string> more = edges[i];
    more.insert(more.end(), {"precision.recipe=mxfp8", "schedule.type=constant", "checkpoint.resume=auto", "training.steps=4"});
    const std::string whole = text("whole", i), cut = text("cut", i);
    run_experts(whole, more);
    more.back() = "training.steps=2";
    run_experts(cut, more);
    more.back() = "training.steps=4";
    run_experts(cut, more);
    CheckpointReader a(checkpoint(whole, 4)), b(checkpoint(cut, 4));
    EXPECT_TRUE(diff_checkpoints(a, b).empty()) << i;
    LoadedModel loaded = load_model(checkpoint(whole, 4), make_backend("cpu"));
    SamplingOptions greedy;
    greedy.max_new_tokens = 9;
    greedy.temperature = 0.0;
    EXPECT_EQ(generate(*loaded.model, {1, 2, 3}, greedy, [](int32_t) { return true; }).size(), 9U) << i;
  }
}

// Statistics are of the rows that tokens have, not of padding nor of what was dropped: 64 of a step's 128 tokens, each for 2 of 5 experts.
TEST_F(Experts, AreMeasuredWithoutPadding) {
  for (const std::string more : {"model.moe.capacity_factor=null", "model.moe.capacity_factor=0.5"}) {
    const TrainedRun trained =
        run_experts("measured" + more, {"precision.recipe=mxfp8", "precision.report_interval=1", "training.steps=1", more});
    int64_t assignments = 0;
    for (const int64_t load : trained.steps[0].routing[0].load) assignments += load;
    const double kept = static_cast<double>(assignments) * (1.0 - trained.steps[0].routing[0].dropped);
    const RunMetrics metrics = read_run_metrics(run_folder("measured" + more));
    for (const PrecisionEvent& event : metrics.precision) {
      if (event.module != "layers.0.moe.experts.down" || event.role != "input") continue;
      int64_t blocks = 0;
      for (const auto& [scale, count] : event.scales) blocks += count;
      EXPECT_EQ(event.scales.count(0), 0U) << "a block of zeros";
      EXPECT_EQ(blocks, std::llround(kept)) << "one of 32 channels a row";
    }
    EXPECT_FALSE(metrics.precision.empty());
  }
}

// Examples in rows of 12 or of 20 tokens.
class ExpertsOfExamples : public Experts {
 protected:
  TrainedRun run_rows_of(int64_t length, const std::string& name, const std::vector<std::string>& more) const {
    std::vector<std::string> all = examples();
    all.insert(all.end(), {"model.max_position_embeddings=20", "precision.dtype=fp32", "training.steps=6", "model.init_std=0.1",
                           text("training.seq_len=", length)});
    all.insert(all.end(), more.begin(), more.end());
    return run_experts(name + text(length), all);
  }
  static void expect_same_routing(const TrainedRun& a, const TrainedRun& b) {
    ASSERT_EQ(a.steps.size(), b.steps.size());
    for (size_t i = 0; i < a.steps.size(); ++i) {
      EXPECT_NEAR(a.losses[i], b.losses[i], 1e-4 * a.losses[i]) << i;
      EXPECT_NEAR(a.norms[i], b.norms[i], 1e-3 * a.norms[i]) << i;
      for (size_t layer = 0; layer < 2; ++layer) {
        const LayerRouting &x = a.steps[i].routing[layer], &y = b.steps[i].routing[layer];
        EXPECT_EQ(x.load, y.load) << i;
        EXPECT_EQ(x.dropped, y.dropped) << i;
        EXPECT_EQ(x.imbalance, y.imbalance) << i;
        EXPECT_NEAR(x.balance_loss.value(), y.balance_loss.value(), 1e-4) << i;
        EXPECT_NEAR(x.sequence_balance_loss.value(), y.sequence_balance_loss.value(), 1e-4) << i;
        EXPECT_NEAR(x.z_loss.value(), y.z_loss.value(), 1e-4) << i;
      }
    }
  }
};

// Padding of rows takes no expert: load, losses, biases, capacity and what is learned are those of the tokens.
TEST_F(ExpertsOfExamples, LearnTheSameOfThemInLongerRows) {
  const std::pair<const char*, std::vector<std::string>> cases[] = {
      {"losses", {"model.moe.aux_loss_coef=0.2", "model.moe.seq_aux_loss_coef=0.2", "model.moe.z_loss_coef=0.01"}},
      {"bias", {"model.moe.score=sigmoid", "model.moe.aux_loss_coef=0", "model.moe.bias_update_rate=0.05"}},
      {"capacity", {"model.moe.capacity_factor=1.1", "training.recompute=full", "model.moe.shared_intermediate_size=32"}}};
  for (const auto& [name, more] : cases) {
    SCOPED_TRACE(name);
    const TrainedRun exact = run_rows_of(12, name, more), padded = run_rows_of(20, name, more);
    expect_same_routing(exact, padded);
    int64_t tokens = 0;
    for (const int64_t load : padded.steps[0].routing[0].load) tokens += load;
    EXPECT_LE(tokens, 8 * 12 * 2);
    if (name == std::string("capacity")) {
      EXPECT_GT(padded.steps[0].routing[0].dropped, 0.0);
    }
    if (name == std::string("bias")) {
      const std::string bias = "buffer.layers.1.moe.expert_bias";
      EXPECT_EQ(tensor("bias12", 6, bias), tensor("bias20", 6, bias));
      EXPECT_NE(tensor("bias12", 6, bias), std::vector<float>(5, 0.0F));
    }
  }
}

// This holds in every module, not in experts alone; along columns and in tiles, too.
TEST_F(ExpertsOfExamples, AreMeasuredWithoutWhatFillsTheirRows) {
  const std::string columns =
      R"(precision.recipes={"own":{"base":"mxfp8","gemms":["dgrad","wgrad"]},"back":{"base":"mxfp8","gemms":["wgrad"]}})";
  for (const std::string recipe : {"mxfp8", "own", "back"}) {
    const auto measured = [&](int64_t length) {
      run_rows_of(length, recipe,
                  {columns, "precision.recipe=" + recipe, "precision.dtype=bf16", "precision.report_interval=1", "training.steps=1",
                   "model.intermediate_size=64", "model.moe.dense_layers=[0]"});
      std::map<std::string, PrecisionEvent> out;
      const RunMetrics metrics = read_run_metrics(run_folder(recipe + text(length)));
      for (const PrecisionEvent& event : metrics.precision) out[event.module + ' ' + event.role] = event;
      return out;
    };
    const auto exact = measured(12), padded = measured(20);
    ASSERT_EQ(exact.size(), padded.size());
    for (const auto& [what, event] : exact) {
      SCOPED_TRACE(recipe + ' ' + what);
      const PrecisionEvent& other = padded.at(what);
      int64_t blocks = 0, other_blocks = 0;
      for (const auto& [scale, count] : event.scales) blocks += count;
      for (const auto& [scale, count] : other.scales) other_blocks += count;
      const bool rows = recipe == "mxfp8" || what.find("weight") != std::string::npos || what.find("experts") != std::string::npos;
      if (rows) {
        EXPECT_EQ(other_blocks, blocks);
      }
      EXPECT_NEAR(other.amax.value(), event.amax.value(), 0.02 * event.amax.value());
      EXPECT_NEAR(other.sqnr_db.value(), event.sqnr_db.value(), rows ? 0.3 : 2.0);
    }
  }
}

TEST_F(Experts, DropNothingInEvaluationAndSamples) {
  run_experts("dropping", {"model.moe.capacity_factor=0.3", "model.init_std=0.3", "training.steps=3"});
  LoadedModel loaded = load_model(checkpoint("dropping", 3), make_backend("cpu"));
  Gpt& model = *loaded.model;
  const std::vector<int32_t> tokens = {1, 4, 7, 0, 2, 3, 5, 6}, positions = {0, 1, 2, 3, 4, 5, 6, 7};
  const Tensor all = model.logits({.batch = 1,
                                   .tokens = from_host(model.device(), Dtype::i32, {8}, tokens.data()),
                                   .positions = from_host(model.device(), Dtype::i32, {8}, positions.data()),
                                   .segment_starts = {}});
  auto cache = model.new_cache();
  model.next_logits({1, 4, 7, 0, 2, 3, 5}, cache);
  const std::vector<float> last = to_host<float>(model.next_logits({6}, cache)),
                           expected = to_host<float>(converted(all.slice(7, 8), Dtype::f32));
  for (size_t i = 0; i < last.size(); ++i) EXPECT_NEAR(last[i], expected[i], 0.02) << i;
}

// A router computes in fp32 where high precision is asked for. Codes of experts.down's output gradient are requantized where they move.
TEST_F(Experts, HaveAPlanThatKnowsWhatMoves) {
  const auto plan = [&](const std::string& more) {
    RunConfig config = this->config("plan", sets({"precision.recipe=mxfp8", more})).config;
    config.model.vocab_size = 8;
    return resolve_plan(config);
  };
  for (const std::string recipe : {"high", "bf16", "fp32"}) {
    const PrecisionPlan ruled = plan(R"(precision.rules=[{"match":"layers.*.moe.router","recipe":")" + recipe + R"("}])");
    EXPECT_EQ(ruled.of("layers.0.moe.router").recipe.compute, Dtype::f32) << recipe;
  }
  const PrecisionPlan codes = plan("precision.quantized_dispatch=true"), values = plan("precision.quantized_dispatch=false");
  EXPECT_NE(codes.hash(), values.hash());
  const auto wgrad = [](const PrecisionPlan& of, const char* module) { return gemm_text(of.of(module).recipe, GemmRole::wgrad); };
  EXPECT_EQ(wgrad(codes, "layers.0.moe.experts.down"), "e4m3 32x1 from 1x32 * e4m3 32x1 from 1x32");
  EXPECT_EQ(wgrad(values, "layers.0.moe.experts.down"), "e4m3 32x1 * e4m3 32x1 from 1x32");
  EXPECT_EQ(wgrad(codes, "layers.0.moe.experts.gate_up"), "e4m3 32x1 * e4m3 32x1 from 1x32");
}

// Scores that vanish beside the others, and a single weight.
TEST_F(Experts, HaveFiniteWeightsWhateverTheyAreForcedTo) {
  const TrainedRun forced = run_experts("forced", {"model.moe.force_balance=true", "model.init_std=20", "training.steps=1"});
  EXPECT_FALSE(forced.steps[0].skipped);
  EXPECT_TRUE(std::isfinite(forced.losses[0])) << forced.losses[0];
  const std::vector<std::string> single = {"model.moe.num_experts_per_tok=1", "model.moe.aux_loss_coef=0", "training.steps=3"};
  run_experts("single", single);
  for (const float m : tensor("single", 3, "m.layers.0.moe.router.weight")) {
    if (m != 0.0F) return;
  }
  FAIL() << "the router learns nothing of the loss";
}

TEST_F(Experts, OfAnotherKindAreNotResumed) {
  run_experts("run", {"training.steps=1"});
  const auto resumed = [&](const std::string& set) { run_experts("run", {"training.steps=2", "checkpoint.resume=auto", set}); };
  for (const std::string set : {"model.moe=null", "model.moe.num_experts_per_tok=1", "model.moe.score=sigmoid",
                                "model.moe.dense_layers=[0]", "model.moe.norm_topk_prob=false"}) {
    const Error error = test::error_of([&] { resumed(set); });
    EXPECT_EQ(error.code(), ExitCode::usage) << set;
    EXPECT_THAT(error.what(), HasSubstr(set.substr(0, set.find('=')) + ": ")) << set;
  }
  EXPECT_NO_THROW(resumed("model.moe.aux_loss_coef=0.5"));
}

TEST_F(Experts, AreRefusedWhereTheyCannotBe) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"model.moe.num_experts_per_tok=6"}, "num_experts_per_tok: must be at most num_experts 5, got 6"},
      {{"model.moe.n_group=2"}, "n_group: must divide num_experts 5, got 2"},
      {{"model.moe.num_experts=6", "model.moe.n_group=6", "model.moe.topk_group=1"},
       "1 group of 1 experts have fewer than num_experts_per_tok 2"},
      {{"model.moe.score=sigmoid", "model.moe.softmax_after_topk=true"}, "needs model.moe.score softmax"},
      {{"model.moe.num_experts_per_tok=1", "model.moe.softmax_after_topk=true"}, "the router learns nothing"},
      {{"model.moe.dense_layers=[2]"}, "there is no layer 2, model.num_layers is 2"},
      {{"model.moe.dense_layers=[0,0]"}, "names layer 0 twice"},
      {{"model.moe.dense_layers=[0,1]"}, "names every layer"},
      {{"model.activation=gelu_erf"}, "experts need swiglu"},
      {{"model.mlp_bias=true"}, "for experts use model.moe.expert_mlp_bias"},
      {{"parallel.tensor=2", "parallel.data=1", "model.moe.intermediate_size=63"},
       "model.moe.intermediate_size 63 cannot be divided among 2 ranks"},
      {{"parallel.data=4", "parallel.expert=2"}, "2 does not divide model.moe.num_experts 5"},
      {{"parallel.data=4", "parallel.expert=4", "model.moe.num_experts=6"}, "4 does not divide model.moe.num_experts 6"},
      {{"parallel.data=4", "parallel.expert=3"}, "3 does not divide parallel.data 4"},
      {{"parallel.data=2", "parallel.expert=2", "model.moe.num_experts=4", "model.moe.intermediate_size=8",
        "model.moe.shared_intermediate_size=0", "model.hidden_size=40", "model.num_attention_heads=2"},
       "2 experts of a rank have 80 rows of experts.down, which is not a multiple of 32"},
      {{"precision.recipe=mxfp8", "model.moe.intermediate_size=40"},
       "output size 80, 2 times model.moe.intermediate_size 40, is not a multiple of 32"},
      {{"model.moe.score=softmax", "model.moe.bias_update_rate=1e-3"}, "model.moe.bias_update_rate: needs model.moe.score sigmoid"},
      {{"model.moe.score=sigmoid", "model.moe.bias_update_rate=-1e-3"}, "model.moe.bias_update_rate"}};
  for (const auto& [more, message] : cases) {
    const Error error = test::error_of([&] { config("refused", sets(more)); });
    EXPECT_EQ(error.code(), ExitCode::usage) << message;
    EXPECT_THAT(error.what(), HasSubstr(message));
  }
}

}  // namespace mantissa::experts_test
