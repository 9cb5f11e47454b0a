// Ranks that train on examples whose masks leave each of them another number of targets.
#include "launched_training.h"

namespace mantissa::example_ranks_test {

class ExampleRanks : public test::LaunchedTraining {
 protected:
  // Writes rows of 16 tokens: rows of several examples, of one that is cut, and of none with a target.
  ExampleRanks() {
    std::string lines;
    for (int i = 0; i < 60; ++i) {
      std::string ids, mask;
      for (int t = 0, tokens = 1 + i * i % 19; t < tokens; ++t) {
        ids += (t > 0 ? "," : "") + std::to_string((i * 7 + t * t) % 60);
        mask += (t > 0 ? "," : "") + std::to_string(i % 4 != 1 && t * 3 > tokens + i % 5);
      }
      lines += R"({"tokens": [)" + ids + R"(], "mask": [)" + mask + "]}\n";
    }
    test::write_file(folder_ / "examples.jsonl", lines);
    test::write_file(
        folder_ / "examples.json",
        R"({"data": {"path": null, "tokenizer": null, "train": [{"path": "examples.jsonl"}], "valid": [{"path": "examples.jsonl"}]},
                         "model": {"vocab_size": 60}, "eval": {"iters": null}})");
  }
  static std::vector<std::string> examples(const std::string& name, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"--set-file", "examples.json"});
    return train(name, more);
  }
};

TEST_F(ExampleRanks, HaveTheLossesAndWeightsOfOneProcessAlsoAfterAStop) {
  ASSERT_EQ(mantissa(examples("alone")).exit_code, 0);
  ASSERT_GE(course("alone").size(), 42U);
  EXPECT_THAT(test::read_file(folder_ / "alone/metrics.jsonl"), ::testing::HasSubstr("\"padding\":0."));
  ASSERT_EQ(launch(2, examples("cut", {"--set", "training.steps=17"})).exit_code, 0);
  const auto resumed = launch(4, examples("cut", {"--resume"}));
  ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
  EXPECT_THAT(course("cut"), ::testing::IsSupersetOf(course("alone")));  // and the evaluation at step 17
  expect_equal("alone", "cut");
}

TEST_F(ExampleRanks, AreAllToldOfABadLine) {
  test::write_file(folder_ / "examples.jsonl", "{\"tokens\": [1, 60], \"mask\": [0, 1]}\n");
  const auto run = launch(2, examples("bad"));
  EXPECT_EQ(run.exit_code, 4);
  EXPECT_THAT(run.errors, ::testing::HasSubstr("examples.jsonl, line 1: tokens[1]: must be an id below the vocabulary size 60, got 60"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "bad"));
}

}  // namespace mantissa::example_ranks_test
