// The trace of launched runs: one file of all ranks, whose exchanges have the bytes that were sent, and what mantissa trace says of it.
#include "launched_training.h"

namespace mantissa::traced_ranks_test {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

class TracedRanks : public test::LaunchedTraining {
 protected:
  std::vector<std::string> traced(const std::string& name, const std::vector<std::string>& sets) const {
    std::vector<std::string> words = train(name);
    for (const std::string& set : {std::string(R"(training.trace={"steps":[2,3]})"), std::string("training.steps=4")})
      words.insert(words.end(), {"--set", set});
    for (const std::string& set : sets) words.insert(words.end(), {"--set", set});
    return words;
  }
  void run(int ranks, const std::string& name, const std::vector<std::string>& sets) const {
    const test::ProcessResult result = ranks == 1 ? mantissa(traced(name, sets)) : launch(ranks, traced(name, sets));
    ASSERT_EQ(result.exit_code, 0) << result.errors;
  }
  json shares_of(const std::string& name) const {
    const test::ProcessResult shown = mantissa({"trace", name, "--json"});
    EXPECT_EQ(shown.exit_code, 0) << shown.errors;
    return json::parse(shown.output);
  }
  // Bytes of all exchanges of a purpose, on all threads of all ranks.
  int64_t exchanged(const std::string& name, const std::string& purpose) const {
    int64_t sum = 0;
    for (const json& event : json::parse(test::read_file(folder_ / (name + "/trace.json")))) {
      if (event["ph"] == "X" && event["cat"] == "exchange" && event["name"] == purpose) sum += event["args"]["bytes"].get<int64_t>();
    }
    return sum;
  }
  // Bytes that all ranks sent for a purpose in the traced steps.
  int64_t sent(const std::string& name, const std::string& purpose) const {
    std::istringstream lines(test::read_file(folder_ / (name + "/metrics.jsonl")));
    int64_t sum = 0;
    for (std::string line; std::getline(lines, line);) {
      const json event = json::parse(line);
      if (event["type"] == "step" && (event["step"] == 2 || event["step"] == 3)) sum += event["comm_bytes"][purpose].get<int64_t>();
    }
    EXPECT_GT(sum, 0) << purpose;
    return sum;
  }
  void expect_shares(const json& shares, int ranks) const {
    ASSERT_EQ(shares["by_rank"].size(), static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      const json& own = shares["by_rank"][static_cast<size_t>(rank)];
      EXPECT_EQ(own["rank"], rank);
      EXPECT_TRUE(own["ended"].get<bool>());
      double sum = 0.0;
      for (const char* part : {"kernels", "exchanges", "waits", "rest"}) {
        EXPECT_GE(own[part].get<double>(), 0.0) << part;
        sum += own[part].get<double>();
      }
      EXPECT_NEAR(sum, own["seconds"].get<double>(), 1e-9);
      EXPECT_GT(own["kernels"].get<double>(), 0.0);
    }
  }
};

// Two layers: four exchanges of activations in each and direction, and outside them those of embedding and loss.
TEST_F(TracedRanks, OfTensorsShareTheFlopsAndShowEveryExchange) {
  const std::vector<std::string> sets = {"precision.recipe=high", "precision.fp8_param_gather=false", "model.num_layers=2",
                                         "logging.interval=1"};
  std::vector<std::string> two = sets;
  two.insert(two.end(), {"parallel.tensor=2", "parallel.sequence_parallel=true"});
  run(1, "one", sets);
  run(2, "two", two);
  const json one = shares_of("one"), shares = shares_of("two");
  expect_shares(shares, 2);
  EXPECT_EQ(2 * shares["flops"].get<double>(), one["flops"].get<double>());
  EXPECT_EQ(shares["kernels"]["exchange of activations"]["calls"], 4 * (12 + 9)) << "in four micro batches";
  EXPECT_EQ(shares["ranks"], 2);
  EXPECT_EQ(exchanged("two", "activations"), sent("two", "activations"));
  EXPECT_GT(shares["by_rank"][0]["exchanges"].get<double>(), 0.0);
  const test::ProcessResult shown = mantissa({"trace", "two"});
  EXPECT_THAT(shown.output, AllOf(HasSubstr("two | steps 2 to 3 | 2 ranks on cpu | "), HasSubstr("\nbusiest: "),
                                  HasSubstr("\nexchange of activations ")));
}

TEST_F(TracedRanks, OfDataSendGradientsAndWeightsBesideTheComputation) {
  run(2, "data", {"logging.interval=1", "parallel.data=2"});
  const json shares = shares_of("data");
  expect_shares(shares, 2);
  EXPECT_EQ(exchanged("data", "gradients"), sent("data", "gradients"));
  EXPECT_EQ(exchanged("data", "parameters"), sent("data", "parameters"));
  EXPECT_TRUE(shares["kernels"].contains("wait"));
  for (const int rank : {0, 1}) {
    EXPECT_GT(shares["by_rank"][static_cast<size_t>(rank)]["beside"].get<double>(), 0.0);
    EXPECT_FALSE(std::filesystem::exists(folder_ / text("data/trace-rank0000", rank, ".json")));
  }
}

TEST_F(TracedRanks, OfExpertsExchangeTokens) {
  run(2, "experts",
      {"logging.interval=1", "parallel.data=2", "parallel.expert=2", "model.moe.num_experts=4", "model.moe.intermediate_size=32",
       "model.moe.num_experts_per_tok=2"});
  const json shares = shares_of("experts");
  expect_shares(shares, 2);
  EXPECT_EQ(exchanged("experts", "activations"), sent("experts", "activations"));
  for (const char* module : {"layers.*.moe", "layers.*.moe.router", "layers.*.moe.experts.gate_up", "layers.*.moe.experts.down"})
    EXPECT_TRUE(shares["modules"].contains(module)) << module;
}

}  // namespace mantissa::traced_ranks_test
