// Runs whose layers are divided among ranks, here threads of one process, beside a run alone: what they must have in common with it.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "mantissa/checkpoint/checkpoint_diff.h"
#include "mantissa/checkpoint/precision_setup.h"
#include "mantissa/checkpoint/saved_model.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa::test {

struct TensorLayout {
  int data, tensor;
  bool sequence;
  int expert = 1;

  int ranks() const { return data * tensor; }
  std::string name() const { return text("dp", data, "tp", tensor, sequence ? "sp" : "", expert > 1 ? text("ep", expert) : ""); }
};

inline const std::vector<TensorLayout> kTensorLayouts = {{1, 2, false}, {1, 2, true},  {1, 4, false},
                                                         {1, 4, true},  {2, 2, false}, {2, 2, true}};

struct TensorCase {
  const char* name;
  double loss;    // largest relative difference of the first loss
  double cosine;  // least, of any gradient
  std::vector<std::string> sets;
  bool experts = false;  // which ranks may share
};

inline double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double ab = 0.0, aa = 0.0, bb = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += double{a[i]} * double{b[i]};
    aa += double{a[i]} * double{a[i]};
    bb += double{b[i]} * double{b[i]};
  }
  return aa == 0.0 && bb == 0.0 ? 1.0 : ab / std::sqrt(aa * bb);
}

class TensorRuns : public TrainingTest, public ::testing::WithParamInterface<TensorCase> {
 protected:
  // 19 tokens a sequence: token shares are ragged.
  std::vector<std::string> sets(const TensorLayout& layout, const std::vector<std::string>& more) const {
    std::vector<std::string> out = {"model.hidden_size=256",
                                    "model.intermediate_size=128",
                                    "model.num_attention_heads=8",
                                    "model.num_key_value_heads=4",
                                    "model.qk_norm=true",
                                    "model.max_position_embeddings=19",
                                    "training.seq_len=19",
                                    "training.micro_batch_size=1",
                                    "training.grad_accum=null",
                                    "training.global_batch_size=4",
                                    "training.accumulation=tree",
                                    "training.threads=1",
                                    "training.steps=1",
                                    "optimizer.grad_clip=0",
                                    text("parallel.data=", layout.data),
                                    text("parallel.tensor=", layout.tensor),
                                    text("parallel.expert=", layout.expert),
                                    text("parallel.sequence_parallel=", layout.sequence ? "true" : "false")};
    out.insert(out.end(), GetParam().sets.begin(), GetParam().sets.end());
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  static std::vector<TensorLayout> layouts() {
    if (GetParam().experts) return {{1, 2, false}, {1, 2, true}, {1, 4, false}, {2, 2, true}, {2, 2, false, 2}, {2, 2, true, 2}};
    return kTensorLayouts;
  }

  // What rank 0 was told.
  TrainedRun run_on(const TensorLayout& layout, const std::string& name, const std::vector<std::string>& more = {}) const {
    const LoadedConfig loaded = config(name, sets(layout, more));
    if (layout.ranks() == 1) return run(loaded);
    TrainedRun out;
    const auto errors = run_ranks(layout.ranks(), [&](const Communicator& world) {
      TrainedRun own = run(loaded, {}, world);
      if (world.rank() == 0) out = std::move(own);
    });
    EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty())) << name;
    return out;
  }

  // Norms and biases that are not one and zero.
  std::string trained_weights() const {
    run_on({1, 1, false}, "weights", {"training.steps=8", "optimizer.lr=3e-2"});
    return "checkpoint.init_from=" + checkpoint("weights", 8);
  }

  std::string codes(const std::string& name, int64_t step) const {
    return nlohmann::json::parse(CheckpointReader(checkpoint(name, step)).manifest().plan).at("quantized").dump();
  }

  // Loss, norm and the gradients of the first step, from weights whose norms and biases are not one and zero, and the table of how near
  // they are.
  void expect_the_first_step_of_one() const {
    const std::string weights = trained_weights();
    const TrainedRun alone = run_on({1, 1, false}, "alone", {weights});
    for (const TensorLayout& layout : layouts()) {
      const TrainedRun together = run_on(layout, layout.name(), {weights});
      ASSERT_EQ(together.losses.size(), 1U) << layout.name();
      EXPECT_NEAR(together.losses[0], alone.losses[0], GetParam().loss * alone.losses[0]) << layout.name();
      EXPECT_NEAR(together.norms[0], alone.norms[0], 20 * GetParam().loss * alone.norms[0]) << layout.name();
      const auto loads = [](const TrainedRun& of) {
        std::vector<std::vector<int64_t>> out;
        for (const LayerRouting& layer : of.steps.at(0).routing) out.push_back(layer.load);
        return out;
      };
      EXPECT_EQ(loads(together), loads(alone)) << layout.name();
      double least = 1.0;
      CheckpointReader of_ranks(checkpoint(layout.name(), 1)), of_one(checkpoint("alone", 1));
      for (const std::string& parameter : parameters("alone", 1)) {
        const double near = cosine(tensor(of_ranks, "m." + parameter), tensor(of_one, "m." + parameter));
        EXPECT_GE(near, GetParam().cosine) << layout.name() << ' ' << parameter;
        least = std::min(least, near);
      }
      std::printf("%-20s %-8s loss %.1e  least cosine %.7f\n", GetParam().name, layout.name().c_str(),
                  std::abs(together.losses[0] / alone.losses[0] - 1.0), least);
    }
  }

  // At a rate that is 0 in fp32, what is drawn, loaded and saved is the same at every layout.
  void expect_the_same_weights_and_codes(int steps) const {
    const std::vector<std::string> still = {"optimizer.lr=1e-60", text("training.steps=", steps)};
    run_on({1, 1, false}, "alone", still);
    for (const TensorLayout& layout : layouts()) {
      run_on(layout, layout.name(), still);
      EXPECT_TRUE(same_elements(codes(layout.name(), steps), codes("alone", steps))) << layout.name();
      CheckpointReader of_ranks(checkpoint(layout.name(), steps)), of_one(checkpoint("alone", steps));
      for (const std::string& parameter : parameters("alone", steps)) {
        EXPECT_EQ(tensor(of_ranks, "master." + parameter), tensor(of_one, "master." + parameter)) << layout.name() << ' ' << parameter;
      }
    }
  }

  // Loss, norm, masters, moments and codes of a number of tensor ranks, at any number of data ranks.
  void expect_the_bits_of_one_data_rank(int steps) const {
    const std::vector<std::string> length = {text("training.steps=", steps)};
    for (const TensorLayout& one : {TensorLayout{1, 2, false}, {1, 2, true}, {1, 4, true}}) {
      const TrainedRun alone = run_on(one, one.name(), length);
      for (const int data : {2, 4}) {
        TensorLayout layout = one;
        layout.data = data;
        layout.expert = GetParam().experts ? 2 : 1;
        if (layout.ranks() > 8) continue;
        const TrainedRun together = run_on(layout, layout.name(), length);
        EXPECT_TRUE(same_elements(together.losses, alone.losses)) << layout.name();
        EXPECT_TRUE(same_elements(together.norms, alone.norms)) << layout.name();
        CheckpointReader expected(checkpoint(one.name(), steps)), found(checkpoint(layout.name(), steps));
        for (const TensorDifference& difference : diff_checkpoints(expected, found))
          ADD_FAILURE() << layout.name() << ": " << difference.name << ": " << difference.what;
        EXPECT_TRUE(same_elements(codes(layout.name(), steps), codes(one.name(), steps))) << layout.name();
      }
    }
  }

  // The recorded codes are those of the saved masters, what ranks hold alike is alike, and who loads it at another layout saves the same.
  void expect_saves_that_any_layout_loads(const std::vector<TensorLayout>& from, const std::vector<TensorLayout>& to, int steps) const {
    const std::string length = text("training.steps=", steps);
    for (const TensorLayout& first : from) {
      const std::string name = "from" + first.name();
      run_on(first, name, {length, "training.replica_check_interval=2"});
      CheckpointReader reader(checkpoint(name, steps));
      EXPECT_NO_THROW(verify_codes(reader, *make_backend("cpu")));
      for (const TensorLayout& second : to) {
        const std::string again = name + "to" + second.name();
        run_on(second, again, {length, "checkpoint.resume=" + checkpoint(name, steps)});
        CheckpointReader other(checkpoint(again, steps));
        for (const TensorDifference& difference : diff_checkpoints(reader, other))
          ADD_FAILURE() << again << ": " << difference.name << ": " << difference.what;
        EXPECT_TRUE(same_elements(codes(again, steps), codes(name, steps))) << again;
      }
    }
  }
};

inline std::vector<TensorCase> tensor_cases() {
  const auto recipe = [](const char* name, std::vector<std::string> more = {}) {
    std::vector<std::string> sets = {"precision.dtype=bf16", std::string("precision.recipe=") + name};
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  };
  return {{"fp32", 1e-6, 0.99999, {"model.attention_bias=all", "model.mlp_bias=true"}},
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
           recipe("fp8_block", {"model.hidden_size=512", "model.intermediate_size=512", "model.num_key_value_heads=8"})},
          {"mxfp4_qat_mxfp8_act", 1e-3, 0.99, recipe("mxfp4_qat_mxfp8_act")},
          {"simulated", 1e-4, 0.999, recipe("own", {R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"], "simulate": {
             "weight": {"format": "e2m1", "block": [16, 16], "rounding": "stochastic"},
             "input": {"format": "e2m1", "block": [1, 16], "rounding": "stochastic"},
             "output_grad": {"format": "e2m1", "block": [1, 16], "rounding": "stochastic"},
             "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})"})},
          {"mxfp8_output", 1e-3, 0.99, recipe("mxfp8", {"precision.fp8_output_proj=true", "model.pad_vocab_to=128"})}};
}

// Four experts of which a token takes two, beside one that all take.
inline std::vector<TensorCase> tensor_cases_of_experts() {
  const std::vector<std::string> experts = {"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=128",
                                            "model.moe.shared_intermediate_size=128"};
  const auto with = [&](std::vector<std::string> sets, const char* last = "training.threads=1") {
    sets.insert(sets.end(), experts.begin(), experts.end());
    sets.emplace_back(last);
    return sets;
  };
  return {{"experts", 1e-6, 0.99999, with({"precision.dtype=fp32"}), true},
          {"gpt_oss", 1e-6, 0.99999,
           with({"precision.dtype=fp32", "model.attention_sinks=true", "model.sliding_window=6", "model.sliding_layers=[1]",
                 "model.activation=swiglu_clamped", "model.moe.router_bias=true", "training.recompute=selective"},
                "model.moe.expert_mlp_bias=true"),
           true},
          {"experts_router", 1e-3, 0.99,
           with({"precision.dtype=bf16", "model.moe.score=sigmoid", "model.moe.bias_update_rate=0.01",
                 R"(precision.rules=[{"match":"layers.*.moe.router","recipe":"mxfp8"}])"},
                "model.moe.num_experts=32"),
           true},
          {"experts_mxfp8", 1e-3, 0.99, with({"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true"}), true},
          {"experts_simulated", 1e-4, 0.999,
           with({"precision.dtype=bf16", "precision.recipe=own", R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"],
                 "simulate": {"weight": {"format": "e2m1", "block": [16, 16], "rounding": "stochastic"},
                              "input": {"format": "e2m1", "block": [1, 16], "rounding": "stochastic"},
                              "output_grad": {"format": "e2m1", "block": [1, 16], "rounding": "stochastic"},
                              "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})"}),
           true},
          {"experts_qat", 1e-3, 0.99,
           with({"precision.dtype=bf16", "precision.recipe=mxfp8", "training.recompute=selective",
                 R"(precision.rules=[{"match":"layers.*.moe.experts.*","recipe":"mxfp4_qat_mxfp8_act"}])"}),
           true}};
}

}  // namespace mantissa::test
