// Runs whose layers are divided among ranks, here threads of one process, start from the weights of a run alone and learn what it learns.
#include <set>

#include "tensor_runs.h"

namespace mantissa::tensor_ranks_test {

using test::Sets;
using test::TensorCase;
using test::TrainedRun;
using test::with;
using ::testing::HasSubstr;

class TensorRanks : public test::TensorRuns {};

TEST_P(TensorRanks, TakeTheFirstStepOfOne) {
  const std::string name = GetParam().name;
  expect_the_first_step_of_one(name == "fp32" || name == "gpt2" || name == "gpt_oss");
}
class TensorRanksAtRest : public test::TensorRuns {};

TEST_P(TensorRanksAtRest, StartFromTheSameWeightsAndCodes) { expect_the_same_weights_and_codes(1, false); }

class TensorRanksAndSaves : public test::TensorRuns {};

TEST_P(TensorRanksAndSaves, HaveTheBitsOfAnyNumberOfDataRanksAndSaveWhatAnyOtherLayoutLoads) {
  if (GetParam().experts) {
    expect_the_bits_of_one_data_rank({1, 2, true}, {2, 4}, 2);
    expect_saves_that_any_layout_loads("dp2tp2spep2", {{2, 1, false, 2}, {1, 4, false}, {1, 1, false}, {4, 1, false, 4}, {2, 2, false}}, 2);
  } else {
    expect_the_bits_of_one_data_rank({1, 2, true}, {2}, 2);
    expect_saves_that_any_layout_loads("dp2tp2sp", {{1, 4, true}, {1, 1, false}, {4, 1, false}, {1, 2, false}}, 2);
  }
}

// The prompt is one token, and so is every later step: under sequence parallelism all ranks but the last have no row of it. fp32 is needed,
// or the likelier of two near tokens might be the other.
class TensorTexts : public test::TensorRuns {};

TEST_P(TensorTexts, AreThoseOfOne) {
  const Sets more = {"training.steps=6", "schedule.warmup_steps=1", "eval.interval=3", "eval.iters=3",
                     R"(eval.samples={"interval":3,"temperature":0,"max_new_tokens":12,"prompts":["a","abcab"]})"};
  const TrainedRun alone = run_case(test::kOne, "alone", more);
  ASSERT_EQ(alone.samples.size(), 4U);
  for (const test::TensorLayout& layout : layouts(false)) {
    const TrainedRun together = run_case(layout, layout.name(), more);
    EXPECT_EQ(together.samples, alone.samples) << layout.name();
    ASSERT_EQ(together.valid_losses.size(), alone.valid_losses.size());
    for (size_t i = 0; i < alone.valid_losses.size(); ++i)
      EXPECT_NEAR(together.valid_losses[i], alone.valid_losses[i], 1e-4) << layout.name();
  }
}

// Cases of this suite; tests/slow has all. The suite has tensor ranks of mxfp8_te in model_tests only.
std::vector<TensorCase> cases_but(const std::set<std::string>& others) {
  std::vector<TensorCase> out = test::tensor_cases();
  for (const TensorCase& of_experts : test::tensor_cases_of_experts()) out.push_back(of_experts);
  std::set<std::string> slow = {"bf16", "mxfp8_te", "experts", "experts_simulated", "experts_qat"};
  slow.insert(others.begin(), others.end());
  std::erase_if(out, [&](const TensorCase& c) { return slow.contains(c.name); });
  return out;
}
const auto kName = [](const ::testing::TestParamInfo<TensorCase>& c) { return std::string(c.param.name); };
INSTANTIATE_TEST_SUITE_P(, TensorRanks, ::testing::ValuesIn(cases_but({})), kName);
// Masters and codes depend on where a weight is divided and in which form it is stored.
INSTANTIATE_TEST_SUITE_P(, TensorRanksAtRest,
                         ::testing::ValuesIn(cases_but({"mxfp8", "mxfp4_qat_mxfp8_act", "mxfp4_qat_mxfp4_act", "nvfp4_qat_nvfp4_act",
                                                        "odd_blocks", "mxfp8_output", "simulated", "experts_padded", "experts_router"})),
                         kName);
INSTANTIATE_TEST_SUITE_P(
    , TensorRanksAndSaves,
    ::testing::ValuesIn(cases_but({"mxfp8", "mxfp4_qat_mxfp8_act", "mxfp4_qat_mxfp4_act", "nvfp4_qat_nvfp4_act", "mxfp8_output"})), kName);
INSTANTIATE_TEST_SUITE_P(, TensorTexts,
                         ::testing::Values(test::tensor_cases()[0], test::tensor_cases()[1], test::tensor_cases_of_experts()[0]), kName);

// Parts of 16 rows: on one rank they are one run of rows, on two they cannot be hashed.
using FineParts = test::TrainingTest;

TEST_F(FineParts, AreFusedOnOneRankAndRefusedOnTwo) {
  const Sets sets = {"precision.dtype=bf16",        "precision.recipe=mxfp4_qat",  "model.hidden_size=128", "model.num_attention_heads=8",
                     "model.num_key_value_heads=1", "model.intermediate_size=128", "training.steps=1"};
  run("run", sets);
  CheckpointReader reader(checkpoint("run", 1));
  EXPECT_EQ(verify_codes(reader, *make_backend("cpu")), 8);
  const Sets two = with(sets, {"parallel.tensor=2", "parallel.data=1", "model.num_key_value_heads=2"});
  const Error error = test::error_of([&] { config("two", two); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(),
              HasSubstr("output size 32 of part k cannot be divided among the 2 ranks of parallel.tensor in multiples of 32"));
}

TEST_F(FineParts, AreRefusedWhereHeadsOrBlocksCannotBeDivided) {
  const Sets mxfp8 = {"precision.recipe=mxfp8", "precision.dtype=bf16", "model.hidden_size=64"};
  const std::pair<Sets, const char*> cases[] = {
      {{"model.num_key_value_heads=1"}, "model.num_key_value_heads 1 cannot be divided among 2 ranks"},
      {with(mxfp8, {"model.intermediate_size=96"}),
       "model.intermediate_size 96 cannot be divided among the 2 ranks of parallel.tensor in multiples of 32"},
      {with(mxfp8, {"precision.fp8_output_proj=true", "model.intermediate_size=128", "model.pad_vocab_to=32", "model.vocab_size=20"}),
       "needs a padded vocabulary in multiples of 64, 32 for each rank of parallel.tensor, got 32"}};
  for (const auto& [sets, message] : cases) {
    const Error error = test::error_of([&] { config("refused", with(sets, {"parallel.tensor=2", "parallel.data=1"})); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(message));
  }
}

}  // namespace mantissa::tensor_ranks_test
