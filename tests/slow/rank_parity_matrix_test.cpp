// Every combination of recipe, tied embeddings, recomputation and data has the same bits at 1, 2, 4 and 8 ranks, and so have models of
// several buckets.
#include "rank_settings.h"

namespace mantissa::rank_parity_matrix_test {

using test::Sets;
using test::TrainedRun;
using test::with;

std::vector<test::RankSetting> combinations() {
  std::vector<test::RankSetting> out;
  for (const test::RankSetting& recipe : test::recipe_settings()) {
    for (const bool tied : {true, false}) {
      for (const std::string recompute : {"none", "selective", "full"}) {
        for (const bool mixture : {false, true}) {
          out.push_back(
              {recipe.name + (tied ? "_tied_" : "_untied_") + recompute + (mixture ? "_mixture" : "_text"),
               with(recipe.sets, {text("model.tie_word_embeddings=", tied ? "true" : "false"), "training.recompute=" + recompute}),
               mixture});
        }
      }
    }
  }
  return out;
}

using RankParityMatrix = test::RankSettings;

TEST_P(RankParityMatrix, HasTheBitsOfOne) { expect_the_bits_of_one(); }

INSTANTIATE_TEST_SUITE_P(, RankParityMatrix, ::testing::ValuesIn(combinations()), [](const auto& c) { return c.param.name; });

// 19M parameters, 76 MB of gradients: several buckets of 40 MB of two ranks, one of 80 MB of four.
class SeveralBuckets : public test::TrainingOnRanks, public ::testing::WithParamInterface<test::RankSetting> {};

TEST_P(SeveralBuckets, HaveTheBitsOfOne) {
  const Sets sets = with(with(tree_of(4), {"model.hidden_size=512", "model.intermediate_size=1376", "model.num_layers=6",
                                           "model.num_attention_heads=8", "training.steps=4"}),
                         GetParam().sets);
  const TrainedRun alone = run_on(1, "alone", sets);
  ASSERT_EQ(alone.losses.size(), 4U);
  for (const int ranks : {2, 4}) {
    const std::string name = text("ranks", ranks);
    SCOPED_TRACE(name);
    expect_same_course(alone, run_on(ranks, name, sets));
    expect_same_checkpoints("alone", name, 4);
  }
}

INSTANTIATE_TEST_SUITE_P(, SeveralBuckets,
                         ::testing::Values(test::RankSetting{"fp32", {}},
                                           test::RankSetting{
                                               "codes",
                                               {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true",
                                                "model.tie_word_embeddings=true", "training.recompute=selective"}}),
                         [](const auto& c) { return c.param.name; });

}  // namespace mantissa::rank_parity_matrix_test
