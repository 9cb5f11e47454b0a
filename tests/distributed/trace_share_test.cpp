// scripts/trace_share.py on the trace of a launched run.
#include "launched_training.h"

namespace mantissa::trace_share_test {

using ::testing::HasSubstr;

class TraceShare : public test::LaunchedTraining {
 protected:
  test::ProcessResult share(const std::string& run) const {
    return test::run_process({"python3", MANTISSA_SOURCE_DIR "/scripts/trace_share.py", run}, folder_.path());
  }
};

// The run has two tensor ranks and two layers: four exchanges in each and direction, and outside them those of embedding and loss.
TEST_F(TraceShare, SaysWhereTheTimeOfEveryRankWent) {
  std::vector<std::string> words = train("run");
  for (const char* set : {"precision.recipe=high", "precision.fp8_param_gather=false", "model.num_layers=2", "training.steps=4",
                          "parallel.tensor=2", "parallel.sequence_parallel=true", R"(training.trace={"steps":[2,3]})"}) {
    words.emplace_back("--set");
    words.emplace_back(set);
  }
  const test::ProcessResult run = launch(2, words);
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  const test::ProcessResult reported = share("run");
  EXPECT_EQ(reported.exit_code, 0) << reported.errors;
  EXPECT_THAT(reported.output, HasSubstr("run | steps 2 to 3 |"));
  std::istringstream lines(reported.output);
  std::string line;
  std::getline(lines, line), std::getline(lines, line);
  for (int rank = 0; rank < 2; ++rank) {
    int number = -1;
    double ms = 0.0, kernels = 0.0, exchanges = 0.0, waits = 0.0, rest = 0.0;
    ASSERT_TRUE(lines >> number >> ms >> kernels >> exchanges >> waits >> rest) << reported.output;
    EXPECT_EQ(number, rank);
    EXPECT_GT(ms, 0.0);
    EXPECT_GT(kernels, 0.0);
    EXPECT_GT(exchanges, 0.0);
    for (const double part : {kernels, exchanges, waits, rest}) EXPECT_GE(part, -0.001) << reported.output;
    EXPECT_NEAR(kernels + exchanges + waits + rest, 1.0, 0.003);
    std::getline(lines, line);
    EXPECT_THAT(line, HasSubstr(" 12 (6.00)        9 (4.50)"));
  }
}

TEST_F(TraceShare, NeedsTraces) {
  std::filesystem::create_directory(folder_ / "empty");
  const test::ProcessResult reported = share("empty");
  EXPECT_EQ(reported.exit_code, 1);
  EXPECT_THAT(reported.errors, HasSubstr("empty: no trace-rank*.json; train with --set 'training.trace="));
}

}  // namespace mantissa::trace_share_test
