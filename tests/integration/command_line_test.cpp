// What the command line says of words that do not fit, and that it takes none of them for something else.
#include <gmock/gmock.h>

#include "process.h"
#include "training.h"

namespace mantissa {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class CommandLine : public test::TrainingTest {
 protected:
  CommandLine() {
    test::write_file(folder_ / "run.json", effective_config(config("run", {"training.steps=1", "data.tokenizer=byte"}).config));
  }

  test::ProcessResult mantissa(std::vector<std::string> arguments) const {
    return test::run_mantissa(std::move(arguments), folder_.path());
  }
  void expect_refused(const std::vector<std::string>& arguments, const std::string& message) const {
    const auto refused = mantissa(arguments);
    EXPECT_EQ(refused.exit_code, 2) << ::testing::PrintToString(arguments) << refused.errors;
    EXPECT_EQ(refused.output, "") << ::testing::PrintToString(arguments);
    EXPECT_THAT(refused.errors, HasSubstr(message)) << ::testing::PrintToString(arguments);
  }
};

TEST_F(CommandLine, AnOptionWithNothingBehindItsEqualsSignTakesNoOtherWord) {
  expect_refused({"export", "run", "--output=", "--weights=packed"}, "--output=: there is no value");
  expect_refused({"report", "--output=", "run"}, "--output=: there is no value");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "--weights=packed"));
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const auto given = mantissa({"generate", run_folder("run"), "--prompt=a=", "--max-new-tokens=1"});
  EXPECT_EQ(given.exit_code, 0) << given.errors;
  EXPECT_THAT(given.output, ::testing::StartsWith("a="));
}

TEST_F(CommandLine, IntegersThatDoNotFitAreRefused) {
  for (const std::string option :
       {"--top-k=99999999999999999999", "--max-new-tokens=9223372036854775808", "--seed=-1", "--seed=18446744073709551616",
        "--threads=4294967296", "--top-k=1.5", "--top-k=0x10", "--top-k=1e3", "--top-k= 1"}) {
    const std::string name = option.substr(0, option.find('='));
    expect_refused({"generate", "run", option}, name + ": must be a whole number from ");
  }
  expect_refused({"eval", "run", "--iters", "99999999999999999999"}, "--iters: must be a whole number from ");
  expect_refused({"launch", "--nproc_per_node=1", "--master_port=x", "--", "true"}, "--master-port: must be a whole number from ");
}

TEST_F(CommandLine, IntegersAreDecimalUpToTheirLimits) {
  ASSERT_EQ(mantissa({"train", "run.json"}).exit_code, 0);
  const auto text = [&](const std::string& seed, const std::string& count) {
    const auto run = mantissa({"generate", run_folder("run"), "--prompt=a", "--max-new-tokens", count, "--seed", seed});
    EXPECT_EQ(run.exit_code, 0) << run.errors;
    return run.output;
  };
  EXPECT_EQ(text("0", "010"), text("0", "10"));
  EXPECT_NE(text("18446744073709551615", "10"), text("0", "10"));
  EXPECT_THAT(mantissa({"generate", "--help"}).output, AllOf(HasSubstr("--seed UINT"), HasSubstr("--top-k INT")));
}

TEST_F(CommandLine, MistakesOfLaunchAreRefusedBeforeAnythingRuns) {
  const auto refused = [&](std::vector<std::string> options, const std::string& because, int code = 2) {
    options.insert(options.begin(), "launch");
    options.insert(options.end(), {"--", "sh", "-c", "echo ran"});
    const auto run = mantissa(options);
    EXPECT_EQ(run.exit_code, code) << because;
    EXPECT_THAT(run.errors, HasSubstr(because));
    EXPECT_THAT(run.output, Not(HasSubstr("ran")));
  };
  for (const std::string count : {"0", "-1", "x", "1.5", "65537", ""}) refused({"--nproc-per-node", count}, "--nproc-per-node");
  refused({"--nproc-per-node", "gpu"}, "this build runs on CPUs only", 3);
  refused({"--nnodes", "0"}, "--nnodes: must be 1 to");
  refused({"--nnodes", "2"}, "--nnodes=2 needs --master-addr");
  refused({"--nnodes", "2", "--node-rank", "2", "--master-addr", "a"}, "--node-rank: must be below --nnodes=2");
  refused({"--max-restarts", "-1"}, "--max-restarts");
  refused({"--master-port", "0"}, "--master-port: must be 1 to 65535");
  refused({"--master-port", "65536"}, "--master-port: must be 1 to 65535");
  refused({"--standalone", "--master-port", "1234"}, "--standalone takes a free port");
  refused({"--tee", "1"}, "needs --log-dir");
  refused({"--tee", "4", "--log-dir", "x"}, "--tee: must be 0 to 3");
  refused({"--ranks-filter", "1"}, "--ranks-filter");
  refused({"--ranks-filter", "0,,"}, "--ranks-filter");
  const auto absent = mantissa({"launch", "--nproc-per-node", "2", "--", "./absent"});
  EXPECT_EQ(absent.exit_code, 2);
  EXPECT_THAT(absent.errors, HasSubstr("./absent: cannot be run: No such file or directory"));
  EXPECT_EQ(mantissa({"launch", "--nproc-per-node", "2"}).exit_code, 2) << "no command";
}

}  // namespace
}  // namespace mantissa
