// The measurements that run on ranks, as a user starts them.
#include "launched_training.h"

namespace mantissa::bench_ranks_test {

using test::LaunchedTraining;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++n;
  return n;
}

class BenchOnRanks : public LaunchedTraining {
 protected:
  std::vector<nlohmann::json> lines(const std::string& file) const {
    std::istringstream in(test::read_file(folder_ / file));
    std::vector<nlohmann::json> out;
    for (std::string line; std::getline(in, line);) out.push_back(nlohmann::json::parse(line));
    return out;
  }
  static std::vector<std::string> train(std::vector<std::string> more) {
    std::vector<std::string> words = {"bench", "train", "run.json", "--time-budget", "0"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
};

// Four sequences of 16 tokens, however many ranks share them.
TEST_F(BenchOnRanks, OfTrainingCountsTheTokensOfAllAndIsToldOnce) {
  const auto run = launch(2, train({"--json", "r.jsonl"}));
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_EQ(count(run.output, "a step, "), 1U) << run.output;
  EXPECT_THAT(run.output,
              ContainsRegex("\\[rank0\\]:run: [0-9.]+ of the GEMM floor's speed, .* FLOP/s of each rank, .*, 2 ranks x 1 thread"));
  ASSERT_EQ(lines("r.jsonl").size(), 1U);
  const nlohmann::json result = lines("r.jsonl").front();
  EXPECT_EQ(result["bench"], "train.run");
  EXPECT_EQ(result["device"]["ranks"], 2);
  EXPECT_GT(result["ratio_gemm"]["med"], 0.0);
  EXPECT_EQ(result["flops"], 13959168) << "as of one process";
}

TEST_F(BenchOnRanks, OfTrainingTakesTurnsWithOneProcess) {
  const auto run = launch(2, train({"--alone", "--json", "r.jsonl"}));
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, ContainsRegex("\\[rank0\\]:run: [0-9.]+ of the speed with one process in 9 slices, "));
  const nlohmann::json result = lines("r.jsonl").front();
  EXPECT_EQ(result["ceiling"]["name"], "one process");
  EXPECT_EQ(result["tokens"], 64);
  EXPECT_EQ(result["slices"], 9);
  EXPECT_GT(result["ratio_against"]["med"], 0.0);
}

TEST_F(BenchOnRanks, RefusesWhatNeedsOthersOrNobody) {
  const auto refused = [&](const test::ProcessResult& run, const char* why) {
    EXPECT_EQ(run.exit_code, 2);
    EXPECT_THAT(run.errors, HasSubstr(why));
  };
  refused(mantissa(train({"--alone"})), "--alone compares several ranks on one host with one process");
  refused(mantissa({"bench", "comm"}), "mantissa launch --nproc-per-node 2 -- bench comm");
  refused(launch(2, train({"--alone", "--against", "training.threads=2"})), "--against is for one process, and this is rank ");
  refused(launch(2, train({"--without-update"})), "--without-update is for one process, and this is rank ");
  refused(launch(2, {"bench", "comm", "--json", "missing/r.jsonl"}), "--json missing/r.jsonl: cannot be opened for writing");
}

// Eight bytes are shares of 0, 4 and 4 then.
TEST_F(BenchOnRanks, OfCollectivesReportsSmallAndLargeOnesAndTheLink) {
  const auto run = launch(3, {"bench", "comm", "--json", "r.jsonl", "--filter", "all_"});
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_EQ(count(run.output, "all_gather "), 9U) << run.output;
  EXPECT_EQ(count(run.output, "all_to_all "), 9U);
  EXPECT_THAT(run.output, ContainsRegex("\\[rank0\\]:link [0-9.e+]+ bytes/s of each rank, for mantissa explain --link"));
  const std::vector<nlohmann::json> results = lines("r.jsonl");
  ASSERT_EQ(results.size(), 18U);
  EXPECT_EQ(results.front()["bytes"], 8);
  EXPECT_EQ(results.back()["bytes"], 64 << 20);
  for (const nlohmann::json& result : results) {
    EXPECT_EQ(result["ranks"], 3);
    EXPECT_GT(result["us"]["med"], 0.0);
    EXPECT_GT(result["ratio_copy"]["med"], 0.0);
  }
}

}  // namespace mantissa::bench_ranks_test
