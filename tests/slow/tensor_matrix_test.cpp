// Runs whose layers are divided among ranks: every layout of the recipes that are divided, and loads of each other's saves.
#include "tensor_runs.h"

namespace mantissa::tensor_matrix_test {

std::vector<test::TensorCase> cases() {
  std::vector<test::TensorCase> out = test::tensor_cases();
  for (const test::TensorCase& of_experts : test::tensor_cases_of_experts()) out.push_back(of_experts);
  // Its padded rows are in the last ranks' shares, where a checkpoint holds fewer rows than the share.
  out.push_back({"vocabulary259", 1e-6, 0.99999, {"data.tokenizer=byte", "model.vocab_size=259", "model.tie_word_embeddings=true"}});
  // Padded to 128 rows: at 4 ranks the last share has no valid column.
  out.push_back({"vocabulary65", 1e-6, 0.99999, {"model.vocab_size=65", "model.pad_vocab_to=128"}});
  for (const char* recipe : {"mxfp8_weights", "mxfp4_qat"})
    out.push_back({recipe, 1e-4, 0.999, {"precision.dtype=bf16", std::string("precision.recipe=") + recipe}});
  return out;
}

using TensorMatrix = test::TensorRuns;

TEST_P(TensorMatrix, TakesTheFirstStepOfOne) { expect_the_first_step_of_one(true); }
TEST_P(TensorMatrix, HasTheWeightsAndCodesOfOneAfterTwentySteps) { expect_the_same_weights_and_codes(20, true); }
TEST_P(TensorMatrix, HasTheBitsOfAnyNumberOfDataRanks) {
  expect_the_bits_of_one_data_rank({1, 2, false}, {2, 4}, 3);
  if (GetParam().most == 4) expect_the_bits_of_one_data_rank({1, 4, true}, {2}, 3);
}
TEST_P(TensorMatrix, SavesAfterTwentyStepsWhatAnyOtherLayoutLoads) {
  for (const test::TensorLayout& first : layouts(true)) {
    const std::string name = "from" + first.name();
    run_case(first, name, {"training.steps=20", "training.replica_check_interval=5"});
    expect_saves_that_any_layout_loads(
        name, {{1, 1, false}, {4, 1, false, GetParam().experts ? 4 : 1}, {1, 2, false}, {1, 4, false}, {2, 2, false}, {1, 2, true}}, 20);
  }
}

INSTANTIATE_TEST_SUITE_P(, TensorMatrix, ::testing::ValuesIn(cases()), [](const auto& c) { return std::string(c.param.name); });

}  // namespace mantissa::tensor_matrix_test
