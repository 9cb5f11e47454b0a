// Every combination of recipe, tied embeddings, recomputation and data has the same bits at 1, 2, 4 and 8 ranks, and so have models of
// several buckets.
#include "rank_settings.h"

namespace mantissa::rank_parity_matrix_test {

using test::TrainedRun;

std::vector<test::RankSetting> combinations() {
  std::vector<test::RankSetting> out;
  for (const test::RankSetting& recipe : test::recipe_settings()) {
    for (const std::string tied : {"true", "false"}) {
      for (const std::string recompute : {"none", "selective", "full"}) {
        for (const std::string data : {"text", "mixture"}) {
          test::RankSetting setting = recipe;
          setting.name += (tied == "true" ? "_tied_" : "_untied_") + recompute + "_" + data;
          setting.sets.insert(setting.sets.end(), {"model.tie_word_embeddings=" + tied, "training.recompute=" + recompute});
          if (data == "mixture") setting.sets.push_back(data);
          out.push_back(setting);
        }
      }
    }
  }
  return out;
}

using RankParityMatrix = test::RankSettings;

TEST_P(RankParityMatrix, HasTheBitsOfOne) { expect_the_bits_of_one({2, 4, 8}); }

INSTANTIATE_TEST_SUITE_P(, RankParityMatrix, ::testing::ValuesIn(combinations()), [](const auto& c) { return c.param.name; });

// 19M parameters: buckets of 25 MB of gradients hold two layers each, and the embedding begins one.
class SeveralBuckets : public test::TrainingOnRanks {
 protected:
  void expect_the_bits_of_one(const std::vector<std::string>& recipe) const {
    std::vector<std::string> sets = {"model.hidden_size=512",        "model.intermediate_size=1376",
                                     "model.num_layers=6",           "model.num_attention_heads=8",
                                     "training.micro_batch_size=1",  "training.grad_accum=null",
                                     "training.global_batch_size=4", "training.accumulation=tree",
                                     "training.threads=1",           "training.steps=4"};
    sets.insert(sets.end(), recipe.begin(), recipe.end());
    const TrainedRun alone = run_on(1, "alone", sets);
    ASSERT_EQ(alone.losses.size(), 4U);
    for (const int ranks : {2, 4}) {
      const std::string name = text("ranks", ranks);
      SCOPED_TRACE(name);
      expect_same_course(alone, run_on(ranks, name, sets));
      expect_same_checkpoints("alone", name, 4);
    }
  }
};

TEST_F(SeveralBuckets, OfFp32HaveTheBitsOfOne) { expect_the_bits_of_one({}); }
TEST_F(SeveralBuckets, OfCodesHaveTheBitsOfOne) {
  expect_the_bits_of_one({"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true",
                          "model.tie_word_embeddings=true", "training.recompute=selective"});
}

}  // namespace mantissa::rank_parity_matrix_test
