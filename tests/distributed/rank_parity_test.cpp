// Runs on ranks have the bits of a run alone: one setting of each recipe (tests/slow has all of them), sizes that ranks do not divide, and
// models so small that some own nothing.
#include "rank_settings.h"

namespace mantissa::rank_parity_test {

using test::RankSetting;
using test::TrainedRun;

std::vector<RankSetting> representatives() {
  const std::vector<std::vector<std::string>> more = {{"training.recompute=selective", "mixture"},
                                                      {"model.tie_word_embeddings=true", "mixture"},
                                                      {"model.tie_word_embeddings=true", "training.recompute=full", "mixture"},
                                                      {"training.recompute=full"},
                                                      {"model.tie_word_embeddings=true", "training.recompute=selective"},
                                                      {"training.recompute=full", "mixture"},
                                                      {"training.recompute=selective", "mixture"}};
  std::vector<RankSetting> out = test::recipe_settings();
  for (size_t i = 0; i < out.size(); ++i) out[i].sets.insert(out[i].sets.end(), more[i].begin(), more[i].end());
  return out;
}

// 5, 13 and 9 row blocks of 32 rows, the last one short.
std::vector<RankSetting> odd_sizes() {
  const std::vector<std::string> sizes = {"model.hidden_size=160", "model.num_attention_heads=5", "model.intermediate_size=416",
                                          "model.num_layers=1",    "data.tokenizer=byte",         "model.vocab_size=259",
                                          "model.pad_vocab_to=1"};
  std::vector<RankSetting> out = {{"odd_high", sizes}, {"odd_gather", sizes}, {"odd_rows", sizes}};
  out[1].sets.insert(out[1].sets.end(), {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true"});
  out[2].sets.insert(out[2].sets.end(), {"precision.dtype=bf16", R"(precision.recipes={"rows":{"base":"mxfp8","weight":{"block":[1,32]}}})",
                                         "precision.recipe=rows", "precision.fp8_param_gather=true", "model.tie_word_embeddings=true"});
  return out;
}

using RankParity = test::RankSettings;

TEST_P(RankParity, HasTheBitsOfOne) { expect_the_bits_of_one({2, 4, 8}); }

INSTANTIATE_TEST_SUITE_P(Recipes, RankParity, ::testing::ValuesIn(representatives()), [](const auto& c) { return c.param.name; });
INSTANTIATE_TEST_SUITE_P(Sizes, RankParity, ::testing::ValuesIn(odd_sizes()), [](const auto& c) { return c.param.name; });

class FewRowBlocks : public test::TrainingOnRanks {};

// A layer of 7 row blocks in the one bucket, and 16 ranks.
TEST_F(FewRowBlocks, RanksThatOwnNothingTakePart) {
  const auto sets = [](const std::string& gather) {
    return std::vector<std::string>{"model.num_layers=1",
                                    "model.intermediate_size=32",
                                    "precision.dtype=bf16",
                                    "precision.recipe=mxfp8",
                                    "training.micro_batch_size=1",
                                    "training.grad_accum=null",
                                    "training.global_batch_size=16",
                                    "training.accumulation=tree",
                                    "training.threads=1",
                                    "eval.interval=10",
                                    "precision.fp8_param_gather=" + gather};
  };
  for (const std::string gather : {"false", "true"}) {
    const std::string suffix = "-" + gather;
    const TrainedRun alone = run_on(1, "alone" + suffix, sets(gather));
    for (const int ranks : {8, 16}) {
      const std::string name = text("ranks", ranks, suffix);
      SCOPED_TRACE(name);
      expect_same_course(alone, run_on(ranks, name, sets(gather)));
      expect_same_checkpoints("alone" + suffix, name, 20);
    }
    const CheckpointReader reader(checkpoint("ranks16" + suffix, 20));
    EXPECT_GT(std::ranges::count(reader.manifest().shards, 0, &Shard::bytes), 0) << "some ranks own nothing";
  }
}

using OddNumbersOfRanks = test::TrainingOnRanks;

// Sums over 3 and 5 ranks have another order than that of one, but always the same.
TEST_F(OddNumbersOfRanks, AreEqualFromRunToRun) {
  for (const int ranks : {3, 5}) {
    const auto run_named = [&](const std::string& name) {
      return run_on(
          ranks, name,
          {"training.micro_batch_size=1", "training.grad_accum=null", "training.global_batch_size=15", "training.accumulation=running",
           "training.threads=1", "precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true",
           "model.intermediate_size=96", "model.tie_word_embeddings=true", "eval.interval=10"});
    };
    const std::string a = text("first", ranks), b = text("second", ranks);
    const TrainedRun first = run_named(a), second = run_named(b);
    ASSERT_EQ(first.losses.size(), 20U);
    expect_same_course(first, second);
    expect_same_checkpoints(a, b, 20);
  }
}

}  // namespace mantissa::rank_parity_test
