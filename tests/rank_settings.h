// What runs on several ranks must have in common with a run alone, setting by setting: recipes, models, recomputation and data.
#pragma once

#include <string>
#include <vector>

#include "training_on_ranks.h"

namespace mantissa::test {

struct RankSetting {
  std::string name;
  std::vector<std::string> sets;
};

// A model of two layers for each recipe, with sizes that its blocks divide; 20 steps of 8 sequences, two evaluations.
inline std::vector<RankSetting> recipe_settings() {
  const std::vector<std::string> blocks_of_32 = {"model.hidden_size=64", "model.intermediate_size=96", "precision.dtype=bf16"};
  const std::vector<std::string> blocks_of_128 = {"model.hidden_size=128", "model.intermediate_size=256", "precision.dtype=bf16"};
  const auto with = [](std::vector<std::string> sets, std::initializer_list<std::string> more) {
    sets.insert(sets.end(), more);
    return sets;
  };
  return {{"high",
           {"model.intermediate_size=80", "model.norm=layer", "model.norm_bias=true", "model.attention_bias=all", "model.mlp_bias=true",
            "model.position=learned"}},
          {"mxfp8", with(blocks_of_32, {"precision.recipe=mxfp8"})},
          {"gather", with(blocks_of_32, {"precision.recipe=mxfp8", "precision.fp8_param_gather=true", "model.attention_bias=qkv"})},
          {"mxfp4_qat_mxfp8_act", with(blocks_of_32, {"precision.recipe=mxfp4_qat_mxfp8_act", "model.mlp_bias=true"})},
          {"fp8_block", with(blocks_of_128, {"precision.recipe=fp8_block"})},
          {"simulated",
           with(blocks_of_32, {"precision.recipe=own", R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"], "simulate": {
                   "weight": {"format": "e3m2", "block": [16, 16], "rounding": "stochastic"},
                   "input": {"format": "e2m1", "block": [1, 16], "scale": "e4m3", "rounding": "stochastic"},
                   "output_grad": {"format": "e2m1", "block": [1, 16], "scale": "e4m3", "rounding": "stochastic"},
                   "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})"})},
          {"experts", with(blocks_of_32, {"precision.recipe=mxfp8", "precision.fp8_param_gather=true", "model.moe.num_experts=3",
                                          "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=32", "model.moe.dense_layers=[0]",
                                          "model.moe.shared_intermediate_size=64", "model.moe.seq_aux_loss_coef=0.01",
                                          R"(precision.rules=[{"match":"layers.*.moe.experts.*","recipe":"mxfp4_qat_mxfp8_act"}])"})}};
}

class RankSettings : public TrainingOnRanks, public ::testing::WithParamInterface<RankSetting> {
 protected:
  RankSettings() {
    write_file(folder_ / "other.txt", repeated("the quick brown fox jumps over a lazy dog. ", 300));
    write_file(folder_ / "valid.txt", repeated("over the lazy fox. ", 40));
  }

  // Two sources and two validation sets, in documents: some targets do not count, and how many of them a rank has differs.
  std::vector<std::string> mixture() const {
    const std::string a = folder_ / "text.txt", b = folder_ / "other.txt", valid = folder_ / "valid.txt";
    return {"data.path=null",
            R"(data.train=[{"path":")" + a + R"(","weight":1},{"path":")" + b + R"(","weight":3}])",
            R"(data.valid=[{"path":")" + valid + R"("},{"path":")" + b + R"("}])",
            "data.tokenizer=byte",
            text("data.eod_id=", int{'o'}),
            "data.mask_eod_loss=true",
            "data.reset_position_ids=true",
            "data.document_mask=true"};
  }

  TrainedRun run_setting(int ranks, const std::string& name) const {
    std::vector<std::string> sets = {"training.micro_batch_size=1",
                                     "training.grad_accum=null",
                                     "training.global_batch_size=8",
                                     "training.accumulation=tree",
                                     "training.threads=1",
                                     "eval.interval=10",
                                     "eval.iters=5",
                                     "checkpoint.interval=10"};
    for (const std::string& set : GetParam().sets) {
      if (set == "mixture") {
        for (const std::string& of_mixture : mixture()) sets.push_back(of_mixture);
      } else {
        sets.push_back(set);
      }
    }
    return run_on(ranks, name, sets);
  }

  void expect_the_bits_of_one(std::initializer_list<int> numbers_of_ranks) const {
    const TrainedRun alone = run_setting(1, "alone");
    ASSERT_EQ(alone.losses.size(), 20U);
    ASSERT_EQ(alone.valid_losses.size(), 2U);
    EXPECT_LT(alone.losses.back(), alone.losses.front());
    for (const int ranks : numbers_of_ranks) {
      const std::string name = text("ranks", ranks);
      SCOPED_TRACE(name);
      expect_same_course(alone, run_setting(ranks, name));
      expect_same_checkpoints("alone", name, 20);
      EXPECT_EQ(shards_of(name, 20), static_cast<size_t>(ranks));
    }
  }
};

}  // namespace mantissa::test
