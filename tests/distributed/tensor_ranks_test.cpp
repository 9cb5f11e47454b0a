// Runs whose layers are divided among ranks, here threads of one process, start from the weights of a run alone and learn what it learns.
#include "tensor_runs.h"

namespace mantissa::tensor_ranks_test {

using test::TensorLayout;
using test::TrainedRun;
using ::testing::HasSubstr;

class TensorRanks : public test::TensorRuns {};

TEST_P(TensorRanks, TakeTheFirstStepOfOne) { expect_the_first_step_of_one(); }
TEST_P(TensorRanks, HaveTheBitsOfAnyNumberOfDataRanks) { expect_the_bits_of_one_data_rank(3); }
TEST_P(TensorRanks, StartFromTheSameWeightsAndCodes) { expect_the_same_weights_and_codes(3); }
TEST_P(TensorRanks, SaveWhatAnyOtherLayoutLoads) {
  expect_saves_that_any_layout_loads({{1, 2, true}, {2, 2, false}, {1, 4, false}},
                                     {{1, 1, false}, {4, 1, false}, {1, 2, false}, {1, 4, true}}, 4);
}

class TensorRanksWithExperts : public test::TensorRuns {};

TEST_P(TensorRanksWithExperts, TakeTheFirstStepOfOne) { expect_the_first_step_of_one(); }
TEST_P(TensorRanksWithExperts, HaveTheBitsOfAnyNumberOfDataRanks) { expect_the_bits_of_one_data_rank(3); }
TEST_P(TensorRanksWithExperts, StartFromTheSameWeightsAndCodes) { expect_the_same_weights_and_codes(3); }
TEST_P(TensorRanksWithExperts, SaveWhatAnyOtherLayoutLoads) {
  expect_saves_that_any_layout_loads({{1, 2, true}, {2, 2, false, 2}, {2, 1, false, 2}},
                                     {{1, 1, false}, {4, 1, false, 4}, {1, 4, false}, {2, 2, true, 2}}, 4);
}

// The prompt is one token, and so is every later step: under sequence parallelism all ranks but the last have no row of it.
// In fp32: else the likelier of two near tokens may be the other.
class TensorTexts : public test::TensorRuns {};

TEST_P(TensorTexts, AreThoseOfOne) {
  const std::vector<std::string> more = {"training.steps=12", "eval.interval=6", "eval.iters=3",
                                         R"(eval.samples={"interval":6,"temperature":0,"max_new_tokens":12,"prompts":["a","abcab"]})"};
  const TrainedRun alone = run_on({1, 1, false}, "alone", more);
  ASSERT_EQ(alone.samples.size(), 4U);
  for (const TensorLayout& layout : layouts()) {
    const TrainedRun together = run_on(layout, layout.name(), more);
    EXPECT_EQ(together.samples, alone.samples) << layout.name();
    ASSERT_EQ(together.valid_losses.size(), alone.valid_losses.size());
    for (size_t i = 0; i < alone.valid_losses.size(); ++i)
      EXPECT_NEAR(together.valid_losses[i], alone.valid_losses[i], 1e-4) << layout.name();
  }
}

const auto kName = [](const ::testing::TestParamInfo<test::TensorCase>& c) { return std::string(c.param.name); };
INSTANTIATE_TEST_SUITE_P(, TensorRanks, ::testing::ValuesIn(test::tensor_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OfExperts, TensorRanksWithExperts, ::testing::ValuesIn(test::tensor_cases_of_experts()), kName);
INSTANTIATE_TEST_SUITE_P(, TensorTexts,
                         ::testing::Values(test::tensor_cases()[0], test::tensor_cases()[1], test::tensor_cases_of_experts()[0]), kName);

// Parts of 16 rows: on one rank they are one run of rows, on two they cannot be hashed.
using FineParts = test::TrainingTest;

TEST_F(FineParts, AreFusedOnOneRankAndRefusedOnTwo) {
  const std::vector<std::string> sets = {
      "precision.dtype=bf16",        "precision.recipe=mxfp4_qat",  "model.hidden_size=128", "model.num_attention_heads=8",
      "model.num_key_value_heads=1", "model.intermediate_size=128", "training.steps=1"};
  run("run", sets);
  CheckpointReader reader(checkpoint("run", 1));
  EXPECT_EQ(verify_codes(reader, *make_backend("cpu")), 8);
  std::vector<std::string> two = sets;
  two.insert(two.end(), {"parallel.tensor=2", "parallel.data=1", "model.num_key_value_heads=2"});
  const Error error = test::error_of([&] { config("two", two); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("out 32 of part k cannot be divided among the 2 ranks of parallel.tensor in multiples of 32"));
}

using TensorRanksRefused = test::TrainingTest;

TEST_F(TensorRanksRefused, WhereHeadsOrBlocksCannotBeDivided) {
  const auto message = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"parallel.tensor=2", "parallel.data=1"});
    const Error error = test::error_of([&] { config("refused", more); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return std::string(error.what());
  };
  EXPECT_THAT(message({"model.num_key_value_heads=1"}), HasSubstr("model.num_key_value_heads 1 cannot be divided among 2 ranks"));
  EXPECT_THAT(message({"precision.recipe=mxfp8", "precision.dtype=bf16", "model.hidden_size=64", "model.intermediate_size=96"}),
              HasSubstr("model.intermediate_size 96 cannot be divided among the 2 ranks of parallel.tensor in multiples of 32"));
  EXPECT_THAT(message({"precision.recipe=mxfp8", "precision.dtype=bf16", "precision.fp8_output_proj=true", "model.hidden_size=64",
                       "model.intermediate_size=128", "model.pad_vocab_to=32", "model.vocab_size=20"}),
              HasSubstr("needs a padded vocabulary in multiples of 64, 32 for each rank of parallel.tensor, got 32"));
}

}  // namespace mantissa::tensor_ranks_test
