// Settings under which runs on several data ranks must have the bits of a run alone: recipes, models, recomputation and data.
#pragma once

#include <algorithm>

#include "training_on_ranks.h"

namespace mantissa::test {

struct RankSetting {
  std::string name;
  Sets sets;
  bool mixture = false;  // two sources and two validation sets, instead of one text
  std::vector<int> ranks = {2, 4, 8};
};
inline void PrintTo(const RankSetting& setting, std::ostream* out) { *out << setting.name; }

inline const Sets kBlocksOf32 = {"model.hidden_size=64", "model.intermediate_size=96", "precision.dtype=bf16"};
inline const Sets kBlocksOf128 = {"model.hidden_size=128", "model.intermediate_size=256", "precision.dtype=bf16"};

// A model of two layers for each recipe, with sizes that its blocks divide.
inline std::vector<RankSetting> recipe_settings() {
  return {{"high",
           {"model.intermediate_size=80", "model.norm=layer", "model.norm_bias=true", "model.attention_bias=all", "model.mlp_bias=true",
            "model.position=learned"}},
          {"mxfp8", with(kBlocksOf32, {"precision.recipe=mxfp8"})},
          {"gather", with(kBlocksOf32, {"precision.recipe=mxfp8", "precision.fp8_param_gather=true", "model.attention_bias=qkv"})},
          {"mxfp4_qat_mxfp8_act", with(kBlocksOf32, {"precision.recipe=mxfp4_qat_mxfp8_act", "model.mlp_bias=true"})},
          {"fp8_block", with(kBlocksOf128, {"precision.recipe=fp8_block"})},
          {"simulated",
           with(kBlocksOf32, {"precision.recipe=own", R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"], "simulate": {
                   "weight": {"format": "e3m2", "block": [16, 16], "rounding": "stochastic"},
                   "input": {"format": "e2m1", "block": [1, 16], "scale": "e4m3", "rounding": "stochastic"},
                   "output_grad": {"format": "e2m1", "block": [1, 16], "scale": "e4m3", "rounding": "stochastic"},
                   "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})"})},
          {"experts", with(kBlocksOf32, {"precision.recipe=mxfp8", "precision.fp8_param_gather=true", "model.moe.num_experts=3",
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

  // Settings of data in documents: some targets do not count, and the number of those that do differs from rank to rank.
  Sets mixture() const {
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

  // Compares six steps, evaluations of 5 batches, which ranks do not share alike, and two saves.
  void expect_the_bits_of_one() const {
    const Sets sets = with(
        with(with(tree_of(8), {"training.steps=6", "schedule.warmup_steps=1", "eval.interval=3", "eval.iters=5", "checkpoint.interval=3"}),
             GetParam().mixture ? mixture() : Sets()),
        GetParam().sets);
    const TrainedRun alone = run_on(1, "alone", sets);
    ASSERT_EQ(alone.losses.size(), 6U);
    ASSERT_EQ(alone.valid_losses.size(), 2U);
    EXPECT_LT(alone.losses.back(), alone.losses.front());
    for (const int ranks : GetParam().ranks) {
      const std::string name = text("ranks", ranks);
      SCOPED_TRACE(name);
      expect_same_course(alone, run_on(ranks, name, sets));
      expect_same_checkpoints("alone", name, 6);
      const CheckpointReader reader(checkpoint(name, 6));
      EXPECT_EQ(reader.manifest().shards.size(), static_cast<size_t>(ranks));
      if (ranks > 8) {
        EXPECT_GT(std::ranges::count(reader.manifest().shards, 0, &Shard::bytes), 0) << "some ranks own nothing";
      }
    }
  }
};

}  // namespace mantissa::test
