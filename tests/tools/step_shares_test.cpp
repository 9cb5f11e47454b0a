// The sums and refusals of `mantissa trace`, from traces that are made up.
#include "tools/trace/step_shares.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "files.h"
#include "metrics/run_trace.h"
#include "testing.h"

namespace mantissa::step_shares_test {

using test::error_of;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;
using tools::read_trace;
using tools::StepShares;

class Shares : public ::testing::Test {
 protected:
  struct Made {
    Track track;
    std::string name;
    int64_t begin, end;  // microseconds
    double flops = 0.0;
    int64_t bytes = 0;
    int thread = 0;
    int64_t number = -1;
  };
  static RecordedSpan span(const Made& made) {
    RecordedSpan out{.name = made.name, .track = made.track, .thread = made.thread, .number = made.number};
    out.flops = made.flops, out.bytes = made.bytes;
    out.begin = std::chrono::microseconds(made.begin), out.duration = std::chrono::microseconds(made.end - made.begin);
    return out;
  }
  // Spans of a step of 1 ms that begins at `at`, in the order of their ends.
  static std::vector<Made> step(int64_t number, int64_t at) {
    return {{Track::kernel, "add", at + 150, at + 250, 1e5, 700},  // a part of the next
            {Track::kernel, "gemm", at + 100, at + 300, 4e5, 2000},
            {Track::gemm, "fprop", at + 100, at + 310},
            {Track::module, "layers.0.mlp.down", at + 90, at + 320},
            {Track::kernel, "add", at + 320, at + 350, 0, 500},
            {Track::module, "layers.0", at + 50, at + 400},
            {Track::pass, "forward", at + 40, at + 420},
            {Track::kernel, "gemm", at + 500, at + 550, 1e5, 100},
            {Track::gemm, "dgrad", at + 500, at + 560},
            {Track::module, "layers.12.mlp.down", at + 490, at + 570},
            {Track::pass, "backward", at + 480, at + 600},
            {Track::kernel, "add", at + 710, at + 720, 0, 10},
            {Track::exchange, "gradients", at + 700, at + 760, 0, 4096},
            {Track::exchange, "parameters", at + 610, at + 800, 0, 64, 1},
            {Track::wait, "wait", at + 800, at + 900},
            {Track::pass, "optimizer", at + 650, at + 950},
            {Track::step, "step", at, at + 1000, 0, 0, 0, number}};
  }
  void write(int rank, int ranks, const std::vector<Made>& spans, bool whole = true, int64_t last = 3,
             int64_t attempt = 1'000'000'000'000'000) const {
    TraceFile file(folder_.path(), {.rank = rank, .ranks = ranks, .first = 2, .last = last, .attempt = attempt, .device = "cpu"});
    std::vector<RecordedSpan> all;
    for (const Made& made : spans) all.push_back(span(made));
    file.write(all);
    if (whole) file.end();
  }
  void write_two_steps(int rank = 0, int ranks = 1, bool whole = true, const std::vector<Made>& behind = {}) const {
    std::vector<Made> spans = {{Track::kernel, "between", 10, 20}};  // before the steps: an evaluation
    for (const int64_t number : {2, 3}) {
      for (const Made& made : step(number, 1000 * number)) spans.push_back(made);
    }
    spans.insert(spans.end(), behind.begin(), behind.end());
    write(rank, ranks, spans, whole);
  }
  StepShares shares(std::optional<int64_t> step = {}) const { return step_shares(read_trace(folder_.path()), step); }
  std::string joined_text() const {
    write_two_steps();
    join_trace(folder_.path(), 1);
    return test::read_file(joined_trace(folder_.path()));
  }
  void expect_damage(const std::string& content, const std::string& message) const {
    test::write_file(joined_trace(folder_.path()), content);
    const Error error = error_of([&] { shares(); });
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    EXPECT_THAT(error.what(), AllOf(HasSubstr("trace.json"), HasSubstr(message)));
  }

  test::TemporaryFolder folder_;
};

TEST_F(Shares, AddUpToTheStep) {
  write_two_steps();
  const StepShares all = shares();
  EXPECT_THAT(all.steps, ElementsAre(2, 3));
  const tools::Times times = all.times();
  EXPECT_NEAR(times.kernels, 2 * 280e-6, 1e-9) << "the add of an exchange is the exchange's, what runs between steps nobody's";
  EXPECT_NEAR(times.exchanges, 2 * 60e-6, 1e-9);
  EXPECT_NEAR(times.waits, 2 * 100e-6, 1e-9);
  EXPECT_NEAR(times.rest, 2 * 560e-6, 1e-9);
  EXPECT_NEAR(all.by_rank.front().beside, 2 * 190e-6, 1e-9);
  double passes = 0.0, modules = 0.0;
  for (const auto& [name, pass] : all.passes) passes += pass.times.all();
  for (const auto& [name, module] : all.modules) modules += module.seconds;
  EXPECT_NEAR(passes, 2e-3, 1e-9);
  EXPECT_NEAR(modules, 2e-3, 1e-9);
  EXPECT_NEAR(all.passes.at("forward").times.kernels, 2 * 230e-6, 1e-9);
  EXPECT_NEAR(all.passes.at("forward").times.rest, 2 * 150e-6, 1e-9);
  EXPECT_NEAR(all.passes.at("optimizer").times.waits, 2 * 100e-6, 1e-9);
  EXPECT_NEAR(all.passes.at("(in none)").times.all(), 2 * 200e-6, 1e-9) << "what is in no pass";
  EXPECT_EQ(all.passes.at("forward").calls, 2);
  EXPECT_EQ(all.flops, 2 * 5e5);
}

TEST_F(Shares, LeaveWhatRanBesideStepsAndBetweenThemToTablesOfTheirOwn) {
  const std::vector<Made> behind = {{Track::kernel, "gemm", 4020, 4030, 1e9},
                                    {Track::step, "evaluation", 4010, 4060, 0, 0, 0, 3},
                                    {Track::step, "save", 4070, 4100, 0, 0, 0, 3},
                                    {Track::step, "evaluation", 4200, 4300, 0, 0, 0, 9}};  // behind a step that was not traced
  for (int rank = 0; rank < 2; ++rank) write_two_steps(rank, 2, true, behind);
  const StepShares all = shares();
  EXPECT_THAT(all.beside, ElementsAre(Key("exchange of parameters")));
  const tools::Cost& beside = all.beside.at("exchange of parameters");
  EXPECT_NEAR(beside.seconds, 2 * 2 * 190e-6, 1e-9);
  EXPECT_EQ(beside.bytes, 2 * 2 * 64);
  EXPECT_EQ(beside.calls, 2 * 2);
  EXPECT_THAT(all.between, ElementsAre(Key("evaluation"), Key("save")));
  EXPECT_NEAR(all.between.at("evaluation").seconds, 2 * 50e-6, 1e-9);
  EXPECT_EQ(all.between.at("save").calls, 2);
  const std::string table = shares_table(all, "runs/a", 20);
  EXPECT_THAT(table,
              AllOf(ContainsRegex("beside the computation +ms a step[^\n]*\nexchange of parameters +0.19 +19.0% +1 "),
                    ContainsRegex("between steps +ms each +times +of the steps' time\nevaluation +0.05 +1 +2.5%\nsave +0.03 +1 +1.5%")));
  const Json json = shares_json(all, "runs/a");
  EXPECT_NEAR(json.at("between").at("evaluation").at("seconds").number(), 25e-6, 1e-9) << "of a step";
  EXPECT_TRUE(shares(2).between.empty());
}

TEST_F(Shares, NameKernelsByTheGemmThatTheyAreAndModulesByTheirKind) {
  write_two_steps();
  const StepShares all = shares();
  std::vector<std::string> kernels, modules;
  for (const auto& [name, cost] : all.kernels) kernels.push_back(name);
  for (const auto& [name, cost] : all.modules) modules.push_back(name);
  EXPECT_THAT(kernels, ElementsAre("(no kernel)", "add", "exchange of gradients", "gemm dgrad", "gemm fprop", "wait"));
  EXPECT_THAT(modules, ElementsAre("(in none)", "layers.*", "layers.*.mlp.down"));
  EXPECT_NEAR(all.kernels.at("gemm fprop").seconds, 2 * 200e-6, 1e-9);
  EXPECT_EQ(all.kernels.at("gemm fprop").flops, 2 * 4e5);
  EXPECT_EQ(all.kernels.at("gemm fprop").bytes, 2 * 2000);
  EXPECT_EQ(all.kernels.at("exchange of gradients").bytes, 2 * 4096);
  EXPECT_EQ(all.kernels.at("add").calls, 2);
  EXPECT_EQ(all.modules.at("layers.*.mlp.down").calls, 4);
  EXPECT_NEAR(all.modules.at("layers.*.mlp.down").seconds, 2 * 310e-6, 1e-9);
  EXPECT_NEAR(all.modules.at("layers.*").seconds, 2 * 120e-6, 1e-9) << "without the module in it";
  EXPECT_EQ(all.modules.at("layers.*").bytes, 2 * 500);
}

TEST_F(Shares, OfOneStepAreThatStepAlone) {
  write_two_steps();
  EXPECT_THAT(shares(3).steps, ElementsAre(3));
  EXPECT_NEAR(shares(3).times().all(), 1e-3, 1e-9);
  EXPECT_NEAR(shares(3).by_rank.front().beside, 190e-6, 1e-9);
  const Error error = error_of([&] { shares(4); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("--step: must be one of 2, 3, which are traced, got 4"));
}

TEST_F(Shares, ShowEveryRankTheMeanAndTheBusiest) {
  write_two_steps(0, 2);
  std::vector<Made> spans;
  for (const int64_t number : {2, 3}) {
    for (Made made : step(number, 4000 * number)) {
      made.begin = 4000 * number + 2 * (made.begin - 4000 * number), made.end = 4000 * number + 2 * (made.end - 4000 * number);
      spans.push_back(made);
    }
  }
  write(1, 2, spans);
  join_trace(folder_.path(), 2);
  const StepShares all = shares();
  EXPECT_EQ(all.by_rank.size(), 2U);
  const std::string shown = shares_table(all, "run", 20);
  EXPECT_THAT(shown, HasSubstr("run | steps 2 to 3 | 2 ranks on cpu | 1.50 ms a step | "));
  EXPECT_THAT(shown, HasSubstr("\nbusiest: 1       2.00    28.0%       6.0%  10.0%  56.0%   19.0%\n"));
  EXPECT_THAT(shown, HasSubstr("\nmean             1.50    28.0%       6.0%  10.0%  56.0%   19.0%\n"));
  EXPECT_THAT(shown, Not(HasSubstr("no end")));
  const auto json = nlohmann::json::parse(shares_json(all, "run").dump());
  EXPECT_NEAR(json["mean"]["seconds"].get<double>(), 1.5e-3, 1e-9);
  EXPECT_NEAR(json["by_rank"][1]["waits"].get<double>(), 200e-6, 1e-9);
  EXPECT_EQ(json["kernels"]["gemm fprop"]["calls"], 1.0);
  EXPECT_NEAR(json["kernels"]["(no kernel)"]["seconds"].get<double>(), 840e-6, 1e-9);
  EXPECT_EQ(json["kernels"]["(no kernel)"]["calls"], 0.0);
  EXPECT_EQ(json["flops"], 5e5);
}

TEST_F(Shares, OfFewerRowsHaveOneForTheOthers) {
  write_two_steps();
  const std::string shown = shares_table(shares(), "run", 2);
  EXPECT_THAT(shown, HasSubstr("\n(no kernel)"));
  EXPECT_THAT(shown, HasSubstr("\ngemm fprop        0.20  20.0%      1      2.0  <0.1\n"));
  EXPECT_THAT(shown, HasSubstr("\n4 others          0.24  24.0%      4      0.4  <0.1\n"));
}

TEST_F(Shares, OfAKilledRunAreThoseOfItsWholeSteps) {
  write_two_steps(0, 2, false);
  const std::filesystem::path part = trace_part(folder_.path(), 0);
  const std::string content = test::read_file(part);
  test::write_file(part, content.substr(0, content.size() - 30));  // the end of step 3, torn
  std::filesystem::remove(trace_part(folder_.path(), 1));
  const StepShares all = shares();
  EXPECT_THAT(all.steps, ElementsAre(2));
  const std::string shown = shares_table(all, "run", 20);
  EXPECT_THAT(shown, HasSubstr("the trace of rank 0 has no end: its run was killed, or still goes on\n"));
  EXPECT_THAT(shown, HasSubstr("the traces of 1 of 2 ranks are not here: 1\n"));
  write(1, 2, step(3, 3000), false);
  EXPECT_THAT(error_of([&] { shares(); }).what(), HasSubstr("holds no whole step that all ranks have"));
  write(1, 2, step(2, 2000), false);
  EXPECT_THAT(shares().steps, ElementsAre(2));
  write_two_steps(1, 2, false);
  EXPECT_THAT(shares().steps, ElementsAre(2)) << "rank 0 has no other";
  std::filesystem::remove(trace_part(folder_.path(), 1));
  write(0, 2, step(2, 0), false);
  const std::string first = test::read_file(part);
  test::write_file(part, first.substr(0, first.size() - 30));
  const Error error = error_of([&] { shares(); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("trace-rank00000.json: holds no whole step"));
}

TEST_F(Shares, OfFewRanksNameThoseThatAreMissing) {
  const auto shown = [&] { return shares_table(shares(), "run", 20); };
  write_two_steps(0, 12, false);
  EXPECT_THAT(shown(), HasSubstr("the traces of 11 of 12 ranks are not here: 1, 2, 3, 4, 5, 6, 7, 8, ...\n"));
  for (const int rank : {1, 2, 4}) write_two_steps(rank, 12, false);
  EXPECT_THAT(shown(), HasSubstr("the traces of 8 of 12 ranks are not here: 3, 5, 6, 7, 8, 9, 10, 11\n"));
}

// An earlier run traced other steps, and the rank could not begin its part of this one.
TEST_F(Shares, OfPartsOfDifferentRunsAreRefused) {
  write(1, 2, step(2, 2000), false, 9);
  write_two_steps(0, 2, false);
  const Error error = error_of([&] { shares(); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("trace-rank00001.json:2: rank 1 traces steps 2 to 9, but rank 0 in "),
                                  HasSubstr("trace-rank00000.json 2 to 3: they are of different runs; remove the older file")));
}

// A restart traces the same steps, and one of its ranks was killed before it replaced its part.
TEST_F(Shares, OfPartsOfTwoAttemptsAreRefused) {
  write(0, 2, step(2, 2000), false, 3, 1'000'000'000'000'001);
  write(1, 2, step(2, 2000), false);
  EXPECT_THAT(error_of([&] { shares(); }).what(),
              AllOf(HasSubstr("trace-rank00001.json:2: rank 1 was traced by an earlier attempt of the run than rank 0 in "),
                    HasSubstr("trace-rank00000.json; remove the older file")));
  write(1, 2, step(2, 2000), false, 3, 1'000'000'000'000'002);
  const Error error = error_of([&] { shares(); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("by a later attempt of the run than rank 0"));
}

TEST_F(Shares, OfADamagedTraceAreRefusedWithFileAndLine) {
  const std::string whole = joined_text();
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string out = whole;
    const size_t at = out.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return out.replace(at, from.size(), to);
  };
  expect_damage(whole.substr(0, whole.size() / 2), "ends in the middle");
  expect_damage(whole.substr(0, whole.size() - 3), "ends in the middle");
  expect_damage(whole.substr(0, whole.rfind("{\"name\"")) + "]\n", "the trace ends before its last rank has");
  expect_damage(changed("\"dur\":200", "\"dur\":-200"), "trace.json:7: dur: must be 0 or more, got -200");
  expect_damage(changed("\"dur\":200.0", "\"dur\":null"), "trace.json:7: ts and dur: must be numbers");
  expect_damage(changed("\"dur\":200", "\"dur\":950"), "overlaps");
  expect_damage(changed("\"cat\":\"kernel\"", "\"cat\":\"colonel\""), "cat: must be one of step, pass,");
  expect_damage(changed("\"version\":1", "\"version\":2"), "version: must be 1, got 2");
  expect_damage(changed("\"ranks\":1", "\"ranks\":2"), "has 1 of 2 ranks");
  expect_damage(changed("\"pid\":0,\"tid\":0", "\"pid\":1,\"tid\":0"), "pid: ");
  expect_damage(changed("\"ph\":\"X\"", "\"ph\":\"B\""), "ph: must be X or M, got B");
  expect_damage(changed("\"flops\":400000", "\"flops\":-1"), "flops: must be 0 or more, got -1");
  expect_damage(changed(whole.substr(whole.find("{\"name\":\"add\""),
                                     whole.find('\n', whole.find("{\"name\":\"add\"")) + 1 - whole.find("{\"name\":\"add\"")),
                        ""),
                "rank 0 had 35 spans, of which 34 are here");
  expect_damage("", "holds no rank of a trace");
  expect_damage("{}\n]\n", "this is no trace: it must begin with a line that is [");
}

// A file of one rank may be what a killed run left, but only if it is a part.
TEST_F(Shares, OfAFileAloneAreThoseOfItsRanks) {
  const std::string whole = joined_text();
  EXPECT_THAT(step_shares(read_trace(joined_trace(folder_.path())), {}).steps, ElementsAre(2, 3));
  test::write_file(joined_trace(folder_.path()), whole.substr(0, whole.size() - 3));
  EXPECT_THAT(error_of([&] { read_trace(joined_trace(folder_.path())); }).what(), HasSubstr("trace.json: ends in the middle"));
  write_two_steps(0, 2, false);
  EXPECT_THAT(step_shares(read_trace(trace_part(folder_.path(), 0)), {}).steps, ElementsAre(2, 3));
}

TEST_F(Shares, NeedATrace) {
  const Error error = error_of([&] { shares(); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr(R"(has no trace; train with --set 'training.trace={"steps":[2,3]}')"));
  EXPECT_EQ(error_of([&] { read_trace(folder_.path() / "missing"); }).code(), ExitCode::usage);
}

}  // namespace mantissa::step_shares_test
