// A checkpoint of any number of ranks loads at any other: what is saved again is the same, and training goes on with the bits of one.
#include "training_on_ranks.h"

namespace mantissa::save_and_load_test {

using test::TrainedRun;

class SaveAndLoad : public test::TrainingOnRanks, public ::testing::WithParamInterface<int> {
 protected:
  // 24 sequences a step. The tree is one of 8 micro batches of 3, which 3 ranks cannot share: they only load and save.
  static std::vector<std::string> sets(int ranks, int64_t steps, std::vector<std::string> more = {}) {
    std::vector<std::string> out = {"training.grad_accum=null",
                                    "training.global_batch_size=24",
                                    text("training.micro_batch_size=", ranks == 3 ? 8 : 3),
                                    text("training.accumulation=", ranks == 3 ? "running" : "tree"),
                                    "training.threads=1",
                                    "schedule.type=constant",
                                    text("training.steps=", steps),
                                    "model.intermediate_size=96",
                                    "model.tie_word_embeddings=true",
                                    "precision.dtype=bf16",
                                    "precision.recipe=mxfp8",
                                    "precision.fp8_param_gather=true"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
};

constexpr int kNumbersOfRanks[] = {1, 2, 3, 4, 8};

TEST_P(SaveAndLoad, AtEveryOtherNumberOfRanks) {
  const int saved_by = GetParam();
  run_on(saved_by, "saved", sets(saved_by, 8));
  ASSERT_EQ(shards_of("saved", 8), static_cast<size_t>(saved_by));
  const std::string resume = "checkpoint.resume=" + checkpoint("saved", 8);
  const TrainedRun expected = run_on(1, "straight", sets(1, 16, {resume}));
  ASSERT_EQ(expected.losses.size(), 8U);
  for (const int loaded_by : kNumbersOfRanks) {
    SCOPED_TRACE(text("loaded by ", loaded_by));
    const std::string again = text("again", loaded_by), on = text("on", loaded_by);
    run_on(loaded_by, again, sets(loaded_by, 8, {resume}));
    EXPECT_EQ(shards_of(again, 8), static_cast<size_t>(loaded_by));
    expect_same_checkpoints("saved", again, 8);
    if (loaded_by == 3) continue;
    expect_same_course(expected, run_on(loaded_by, on, sets(loaded_by, 16, {resume})));
    expect_same_checkpoints("straight", on, 16);
  }
}

INSTANTIATE_TEST_SUITE_P(, SaveAndLoad, ::testing::ValuesIn(kNumbersOfRanks), [](const auto& c) { return text("saved_by_", c.param); });

}  // namespace mantissa::save_and_load_test
