// Runs whose layers are divided among ranks, here threads of one process, and checks against a run alone.
#pragma once

#include <cmath>

#include "checkpoint/checkpoint_diff.h"
#include "checkpoint/precision_setup.h"
#include "training_on_ranks.h"

namespace mantissa::test {

struct TensorCase {
  const char* name;
  double loss;    // largest relative difference of the first loss
  double cosine;  // least, of any gradient
  Sets sets;
  bool experts = false;   // which ranks may share
  int most = 4;           // tensor ranks
  bool examples = false;  // with padding behind them
};
inline void PrintTo(const TensorCase& c, std::ostream* out) { *out << c.name; }

inline double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += double{a[i]} * double{b[i]};
    aa += double{a[i]} * double{a[i]};
    bb += double{b[i]} * double{b[i]};
  }
  return aa == 0.0 && bb == 0.0 ? 1.0 : ab / std::sqrt(aa * bb);
}

inline const TensorLayout kOne{1, 1, false};

class TensorRuns : public TrainingOnRanks, public ::testing::WithParamInterface<TensorCase> {
 protected:
  // Runs with 19 tokens a sequence, so that token shares are ragged, and a share of four ranks is whole blocks of 32.
  TrainedRun run_case(const TensorLayout& layout, const std::string& name, const Sets& more = {}) const {
    const Sets base = {
        "model.hidden_size=128", "model.intermediate_size=128", "model.num_attention_heads=8",      "model.num_key_value_heads=4",
        "model.head_dim=32",     "model.qk_norm=true",          "model.max_position_embeddings=19", "training.seq_len=19",
        "training.steps=1",      "optimizer.grad_clip=0"};
    const Sets data = GetParam().examples ? examples() : Sets();
    return run_on(layout, name, with(with(with(with(base, tree_of(4)), data), GetParam().sets), more));
  }

  // All layouts, or some that take every path of a recipe.
  static std::vector<TensorLayout> layouts(bool all) {
    std::vector<TensorLayout> out = {{1, 2, true}, {1, 4, false}, {2, 2, false, GetParam().experts ? 2 : 1}};
    if (all)
      out.insert(out.end(), {{1, 2, false}, {2, 2, true}, GetParam().experts ? TensorLayout{2, 2, true, 2} : TensorLayout{1, 4, true}});
    std::erase_if(out, [](const TensorLayout& layout) { return layout.tensor > GetParam().most; });
    return out;
  }

  std::string codes(const std::string& name, int64_t step) const {
    return nlohmann::json::parse(CheckpointReader(checkpoint(name, step)).manifest().plan).at("quantized").dump();
  }
  void expect_same_tensors(const std::string& expected, const std::string& found, int64_t step) const {
    CheckpointReader a(checkpoint(expected, step)), b(checkpoint(found, step));
    for (const TensorDifference& difference : diff_checkpoints(a, b))
      ADD_FAILURE() << found << ": " << difference.name << ": " << difference.what;
    EXPECT_TRUE(same_elements(codes(found, step), codes(expected, step))) << found;
  }

  // Compares loss, norm, routes and gradients of the first step, from weights whose norms and biases are not one and zero.
  void expect_the_first_step_of_one(bool all) const {
    run_case(kOne, "weights", {"training.steps=4", "optimizer.lr=3e-2"});
    const Sets weights = {"checkpoint.init_from=" + checkpoint("weights", 4)};
    const auto loads = [](const TrainedRun& of) {
      std::vector<std::vector<int64_t>> out;
      for (const LayerRouting& layer : of.steps.at(0).routing) out.push_back(layer.load);
      return out;
    };
    const TrainedRun alone = run_case(kOne, "alone", weights);
    for (const TensorLayout& layout : layouts(all)) {
      SCOPED_TRACE(layout.name());
      const TrainedRun together = run_case(layout, layout.name(), weights);
      ASSERT_EQ(together.losses.size(), 1U);
      EXPECT_NEAR(together.losses[0], alone.losses[0], GetParam().loss * alone.losses[0]);
      EXPECT_NEAR(together.norms[0], alone.norms[0], 20 * GetParam().loss * alone.norms[0]);
      EXPECT_EQ(loads(together), loads(alone));
      CheckpointReader of_ranks(checkpoint(layout.name(), 1)), of_one(checkpoint("alone", 1));
      for (const std::string& parameter : parameters("alone", 1))
        EXPECT_GE(cosine(tensor(of_ranks, "m." + parameter), tensor(of_one, "m." + parameter)), GetParam().cosine) << parameter;
    }
  }

  // Uses a rate that is 0 in fp32: what is drawn and saved is the same at every layout, and a step more leaves the masters as they are.
  void expect_the_same_weights_and_codes(int steps, bool all) const {
    const Sets still = {"optimizer.lr=1e-60", text("training.steps=", steps)};
    run_case(kOne, "still", still);
    run_case(kOne, "later", {"optimizer.lr=1e-60", text("training.steps=", steps + 1)});
    CheckpointReader of_one(checkpoint("still", steps)), later(checkpoint("later", steps + 1));
    for (const std::string& parameter : parameters("still", steps))
      EXPECT_EQ(tensor(later, "master." + parameter), tensor(of_one, "master." + parameter)) << parameter;
    for (const TensorLayout& layout : layouts(all)) {
      const std::string name = "still" + layout.name();
      run_case(layout, name, still);
      EXPECT_TRUE(same_elements(codes(name, steps), codes("still", steps))) << name;
      CheckpointReader of_ranks(checkpoint(name, steps));
      for (const std::string& parameter : parameters("still", steps))
        EXPECT_EQ(tensor(of_ranks, "master." + parameter), tensor(of_one, "master." + parameter)) << name << ' ' << parameter;
    }
  }

  // Compares loss, norm, masters, moments and codes of a number of tensor ranks, at any number of data ranks. What ranks hold alike is
  // alike.
  void expect_the_bits_of_one_data_rank(const TensorLayout& one, const std::vector<int>& data, int steps) const {
    const Sets more = {text("training.steps=", steps), "training.replica_check_interval=1"};
    const TrainedRun alone = run_case(one, one.name(), more);
    for (TensorLayout layout = one; const int ranks : data) {
      layout.data = ranks;
      layout.expert = GetParam().experts ? 2 : 1;
      const TrainedRun together = run_case(layout, layout.name(), more);
      EXPECT_TRUE(same_elements(together.losses, alone.losses)) << layout.name();
      EXPECT_TRUE(same_elements(together.norms, alone.norms)) << layout.name();
      expect_same_tensors(one.name(), layout.name(), steps);
    }
  }

  // The recorded codes are those of the saved masters. Who loads a save at another layout saves the same, one layout after the other.
  void expect_saves_that_any_layout_loads(const std::string& saved, const std::vector<TensorLayout>& then, int steps) const {
    CheckpointReader reader(checkpoint(saved, steps));
    EXPECT_NO_THROW(verify_codes(reader, *make_backend("cpu")));
    std::string from = saved;
    for (const TensorLayout& layout : then) {
      if (layout.tensor > GetParam().most) continue;
      const std::string again = text(saved, "-to-", layout.name());
      run_case(layout, again, {text("training.steps=", steps), "checkpoint.resume=" + checkpoint(from, steps)});
      expect_same_tensors(saved, again, steps);
      from = again;
    }
  }
};

inline std::vector<TensorCase> tensor_cases() {
  const auto recipe = [](const char* name, const Sets& more = {}) {
    return with({"precision.dtype=bf16", std::string("precision.recipe=") + name}, more);
  };
  return {
      {"fp32", 1e-6, 0.99999, {"model.attention_bias=all", "model.mlp_bias=true"}},
      {"gpt2",
       1e-6,
       0.99999,
       {"model.norm=layer", "model.norm_bias=true", "model.attention_sinks=true", "model.sliding_window=6", "model.position=learned",
        "model.activation=gelu_tanh", "model.attention_bias=all", "model.mlp_bias=true", "model.tie_word_embeddings=true",
        "training.recompute=full"}},
      {"bf16", 1e-4, 0.999, recipe("high")},
      {"mxfp8", 1e-3, 0.99, recipe("mxfp8")},
      {"mxfp8_te", 1e-3, 0.99, recipe("mxfp8_te")},
      {"mxfp8_gather", 1e-3, 0.99, recipe("mxfp8", {"precision.fp8_param_gather=true", "training.recompute=selective"})},
      {"fp8_block", 1e-3, 0.99,
       recipe("fp8_block", {"model.intermediate_size=256", "model.num_key_value_heads=8", "model.hidden_size=328", "model.head_dim=32"}),
       false, 2},
      {"mxfp4_qat_mxfp8_act", 1e-3, 0.99, recipe("mxfp4_qat_mxfp8_act")},
      {"mxfp4_qat_mxfp4_act", 1e-3, 0.99, recipe("mxfp4_qat_mxfp4_act")},
      {"nvfp4_qat_nvfp4_act", 1e-3, 0.99, recipe("nvfp4_qat_nvfp4_act")},
      {"odd_blocks", 1e-3, 0.99, recipe("mxfp8", {"precision.fp8_param_gather=true", "model.hidden_size=72", "model.head_dim=32"})},
      {"simulated", 1e-4, 0.999, recipe("own", {R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"], "simulate": {
             "weight": {"format": "e2m1", "block": [16, 16], "rounding": "stochastic"},
             "input": {"format": "e2m1", "block": [1, 16], "rounding": "stochastic"},
             "output_grad": {"format": "e2m1", "block": [1, 16], "rounding": "stochastic"},
             "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})"})},
      {"mxfp8_output", 1e-3, 0.99, recipe("mxfp8", {"precision.fp8_output_proj=true", "model.pad_vocab_to=128"})},
      {"table", 1e-3, 0.99,
       recipe("mxfp4_qat", {R"(precision.rules=[{"match": "embed", "recipe": "mxfp4_qat"}])", "model.tie_word_embeddings=true",
                            "model.pad_vocab_to=128"})}};
}

// Four experts of which a token takes two, beside one that all take.
inline std::vector<TensorCase> tensor_cases_of_experts() {
  const Sets experts = {"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=128",
                        "model.moe.shared_intermediate_size=128"};
  const auto of = [&](const Sets& sets, const Sets& last = {}) { return with(with(sets, experts), last); };
  return {{"experts", 1e-6, 0.99999, of({"precision.dtype=fp32"}), true},
          {"experts_padded", 1e-6, 0.99999,
           of({"precision.dtype=fp32", "model.moe.aux_loss_coef=0.1", "model.moe.seq_aux_loss_coef=0.1", "model.moe.capacity_factor=1.1"}),
           true, 4, true},
          {"gpt_oss", 1e-6, 0.99999,
           of({"precision.dtype=fp32", "model.attention_sinks=true", "model.sliding_window=6", "model.sliding_layers=[1]",
               "model.activation=swiglu_clamped", "model.moe.router_bias=true", "training.recompute=selective"},
              {"model.moe.expert_mlp_bias=true"}),
           true},
          {"experts_router", 1e-3, 0.99,
           of({"precision.dtype=bf16", "model.moe.score=sigmoid", "model.moe.bias_update_rate=0.01",
               R"(precision.rules=[{"match":"layers.*.moe.router","recipe":"mxfp8"}])"},
              {"model.moe.num_experts=32", "model.moe.intermediate_size=32"}),
           true},
          {"experts_mxfp8", 1e-3, 0.99, of({"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true"}), true},
          {"experts_simulated", 1e-4, 0.999,
           of({"precision.dtype=bf16", "precision.recipe=own", R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"],
                 "simulate": {"weight": {"format": "e2m1", "block": [16, 16], "rounding": "stochastic"},
                              "input": {"format": "e2m1", "block": [1, 16], "rounding": "stochastic"},
                              "output_grad": {"format": "e2m1", "block": [1, 16], "rounding": "stochastic"},
                              "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})"}),
           true},
          {"experts_qat", 1e-3, 0.99,
           of({"precision.dtype=bf16", "precision.recipe=mxfp8", "training.recompute=selective",
               R"(precision.rules=[{"match":"layers.*.moe.experts.*","recipe":"mxfp4_qat_mxfp8_act"}])"}),
           true}};
}

}  // namespace mantissa::test
