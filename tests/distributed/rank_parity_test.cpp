// Runs on data ranks have the bits of a run alone: one setting of each recipe (tests/slow has all of them), sizes that ranks do not divide,
// and models so small that some own nothing. A checkpoint of any number of ranks loads at any other.
#include "rank_settings.h"

namespace mantissa::rank_parity_test {

using test::kBlocksOf32;
using test::RankSetting;
using test::Sets;
using test::TrainedRun;
using test::with;

std::vector<RankSetting> settings() {
  const Sets tied = {"model.tie_word_embeddings=true"}, full = {"training.recompute=full"}, selective = {"training.recompute=selective"};
  const Sets more[] = {selective, tied, with(tied, full), full, with(tied, selective), full, selective};
  std::vector<RankSetting> out = test::recipe_settings();
  for (size_t i = 0; i < out.size(); ++i) {
    out[i].sets = with(out[i].sets, more[i]);
    out[i].mixture = i != 3 && i != 4;
    out[i].ranks = {i == 0 || i == 4 ? 2 : i == 2 ? 8 : 4};
  }
  // 5, 13 and 9 row blocks of 32 rows, the last one short.
  const Sets odd = {"model.hidden_size=160", "model.num_attention_heads=5", "model.intermediate_size=416", "model.num_layers=1",
                    "data.tokenizer=byte",   "model.vocab_size=259",        "model.pad_vocab_to=1"};
  const Sets gather = {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true"};
  out.push_back({"odd_high", odd, false, {4}});
  out.push_back({"odd_gather", with(odd, gather), false, {8}});
  out.push_back({"odd_rows",
                 with(with(odd, gather),
                      with(tied, {R"(precision.recipes={"rows":{"base":"mxfp8","weight":{"block":[1,32]}}})", "precision.recipe=rows"})),
                 false,
                 {4}});
  // Widths of 2.25 and 3.1 blocks of 32, of 1.1 and 1.6 of 128; a vocabulary of 8.1.
  const Sets blocks_of_32 = {"model.hidden_size=72", "model.intermediate_size=100",    "data.tokenizer=byte",
                             "model.vocab_size=259", "precision.fp8_output_proj=true", "model.attention_bias=qkv"};
  const Sets fours = {"model.hidden_size=72", "model.intermediate_size=100", "precision.dtype=bf16",
                      R"(precision.rules=[{"match": "embed", "recipe": "mxfp4_qat"}, {"match": "*.qkv", "recipe": "mxfp4_qat"}])"};
  out.push_back({"odd_blocks_mxfp8", with(gather, blocks_of_32), false, {2}});
  out.push_back({"odd_blocks_mxfp4", with(fours, with(tied, {"precision.recipe=mxfp4_qat_mxfp8_act"})), true, {2}});
  out.push_back({"odd_blocks_fp8_block",
                 {"model.hidden_size=144", "model.intermediate_size=200", "precision.dtype=bf16", "precision.recipe=fp8_block",
                  "precision.fp8_param_gather=true", "optimizer.lr=3e-3"},
                 false,
                 {2}});
  // A layer of 7 row blocks in the one bucket, and 16 ranks.
  for (const char* gathers : {"false", "true"}) {
    out.push_back({text("few_blocks_", gathers),
                   with(gather, {"model.num_layers=1", "model.intermediate_size=32", "training.global_batch_size=16",
                                 text("precision.fp8_param_gather=", gathers)}),
                   false,
                   {16}});
  }
  return out;
}

using RankParity = test::RankSettings;

TEST_P(RankParity, HasTheBitsOfOne) { expect_the_bits_of_one(); }

INSTANTIATE_TEST_SUITE_P(, RankParity, ::testing::ValuesIn(settings()), [](const auto& c) { return c.param.name; });

class NumbersOfRanks : public test::TrainingOnRanks {
 protected:
  const Sets model_ = {"model.intermediate_size=96", "model.tie_word_embeddings=true", "precision.dtype=bf16", "precision.recipe=mxfp8",
                       "precision.fp8_param_gather=true"};
};

// Sums over five ranks have another order than that of one, but always the same.
TEST_F(NumbersOfRanks, ThatAreOddAreEqualFromRunToRun) {
  const Sets sets =
      with(with(tree_of(15), model_), {"training.accumulation=running", "training.steps=4", "schedule.warmup_steps=1", "eval.interval=2"});
  const TrainedRun first = run_on(5, "first", sets), second = run_on(5, "second", sets);
  ASSERT_EQ(first.losses.size(), 4U);
  expect_same_course(first, second);
  expect_same_checkpoints("first", "second", 4);
}

// Each run saves again what it loaded from the one before, and training goes on with the bits of one. 24 sequences a step: the tree is one
// of 8 micro batches of 3, which 3 ranks cannot share; they only load and save.
TEST_F(NumbersOfRanks, LoadWhatAnyOtherSaved) {
  const auto run_from = [&](int ranks, const std::string& name, int64_t steps, const std::string& from) {
    return run_on(
        ranks, name,
        with(with(tree_of(24), model_),
             {text("training.micro_batch_size=", ranks == 3 ? 8 : 3), text("training.accumulation=", ranks == 3 ? "running" : "tree"),
              "schedule.type=constant", "schedule.warmup_steps=1", text("training.steps=", steps), "checkpoint.resume=" + from}));
  };
  run_from(1, "saved", 2, "never");
  const TrainedRun straight = run_from(1, "straight", 4, checkpoint("saved", 2));
  ASSERT_EQ(straight.losses.size(), 2U);
  std::string from = "saved";
  for (const int ranks : {2, 8, 3, 4, 1}) {
    SCOPED_TRACE(text(ranks, " from ", from));
    const std::string again = text("again", ranks), on = text("on", ranks);
    run_from(ranks, again, 2, checkpoint(from, 2));
    EXPECT_EQ(shards_of(again, 2), static_cast<size_t>(ranks));
    expect_same_checkpoints("saved", again, 2);
    if (ranks != 3) {
      expect_same_course(straight, run_from(ranks, on, 4, checkpoint(from, 2)));
      expect_same_checkpoints("straight", on, 4);
    }
    from = again;
  }
}

}  // namespace mantissa::rank_parity_test
