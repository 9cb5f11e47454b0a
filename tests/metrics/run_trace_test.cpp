// The file of a run's trace: its parts, and how they are joined.
#include "metrics/run_trace.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "files.h"
#include "testing.h"
#include "traced_steps.h"

namespace mantissa::run_trace_test {

using nlohmann::json;
using test::error_of;
using test::read_file;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Le;
using ::testing::SizeIs;

class TraceFiles : public ::testing::Test {
 protected:
  // Writes the part of a rank with as many spans as its number says, and one.
  void write_part(int rank, int ranks, bool whole = true) const {
    TraceFile file(folder_.path(), {.rank = rank, .ranks = ranks, .first = 2, .last = 3, .device = "cpu"});
    RecordedSpan span{.name = "gemm", .track = Track::kernel, .thread = 0};
    span.bytes = 64, span.flops = 128.0, span.operands = "a bf16 [2, 4]";
    span.begin = std::chrono::nanoseconds(1500), span.duration = std::chrono::nanoseconds(250);
    file.write(std::vector<RecordedSpan>(static_cast<size_t>(rank) + 1, span));
    if (whole) file.end();
  }
  bool has(const std::filesystem::path& file) const { return std::filesystem::exists(file); }

  test::TemporaryFolder folder_;
};

TEST_F(TraceFiles, AreTheEventsOfChromeOneALine) {
  write_part(0, 1);
  join_trace(folder_.path(), 1);
  const json events = json::parse(read_file(joined_trace(folder_.path())));
  ASSERT_THAT(events, SizeIs(5));
  EXPECT_EQ(events[0]["name"], "mantissa");
  EXPECT_EQ(events[0]["args"]["version"], 1);
  EXPECT_EQ(events[0]["args"]["first"], 2);
  EXPECT_EQ(events[1]["name"], "process_name");
  EXPECT_THAT(events[1]["args"]["name"].get<std::string>(), HasSubstr("rank 0 on "));
  EXPECT_EQ(events[2]["name"], "thread_name");
  EXPECT_EQ(events[3], json::parse(R"({"name": "gemm", "cat": "kernel", "ph": "X", "ts": 1.5, "dur": 0.25, "pid": 0, "tid": 0,
                                       "args": {"bytes": 64, "flops": 128, "operands": "a bf16 [2, 4]"}})"));
  EXPECT_EQ(events[4], json::parse(R"({"name": "end", "ph": "M", "pid": 0, "args": {"spans": 1}})"));
}

TEST_F(TraceFiles, OfAllRanksBecomeOne) {
  for (int rank = 0; rank < 3; ++rank) write_part(rank, 3);
  join_trace(folder_.path(), 3);
  std::map<int, int> spans;
  for (const json& event : json::parse(read_file(joined_trace(folder_.path())))) spans[event["pid"]] += event["ph"] == "X" ? 1 : 0;
  EXPECT_THAT(spans, ElementsAre(std::pair(0, 1), std::pair(1, 2), std::pair(2, 3)));
  for (int rank = 0; rank < 3; ++rank) EXPECT_FALSE(has(trace_part(folder_.path(), rank)));
}

TEST_F(TraceFiles, StayPartsUntilAllAreWhole) {
  write_part(0, 2);
  EXPECT_THAT(error_of([&] { join_trace(folder_.path(), 2); }).what(), HasSubstr("trace-rank00001.json"));
  write_part(1, 2, false);
  const Error error = error_of([&] { join_trace(folder_.path(), 2); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("trace-rank00001.json: has no end"));
  EXPECT_TRUE(has(trace_part(folder_.path(), 0)) && has(trace_part(folder_.path(), 1)));
  EXPECT_FALSE(has(joined_trace(folder_.path())));
}

TEST_F(TraceFiles, KeepThoseOfAnEarlierAttemptOfMoreRanksUnderTheirFirstStep) {
  for (const int rank : {0, 1, 3}) write_part(rank, 4, false);  // rank 2 could not write
  test::write_file(joined_trace(folder_.path()), "no trace");
  const std::string of_three = read_file(trace_part(folder_.path(), 3));
  write_part(0, 1);
  for (int rank = 1; rank < 4; ++rank) EXPECT_FALSE(has(trace_part(folder_.path(), rank))) << rank;
  for (const int rank : {0, 1, 3}) EXPECT_TRUE(has(folder_ / text("trace-from-00002-rank0000", rank, ".json"))) << rank;
  EXPECT_EQ(read_file(folder_ / "trace-from-00002-rank00003.json"), of_three);
  EXPECT_FALSE(has(folder_ / "trace-from-00002.json")) << "what is no trace does not stay";
  EXPECT_FALSE(has(joined_trace(folder_.path())));
  join_trace(folder_.path(), 1);
  const std::string first = read_file(joined_trace(folder_.path()));
  EXPECT_THAT(json::parse(first), SizeIs(5));
  write_part(0, 1);
  EXPECT_EQ(read_file(folder_ / "trace-from-00002.json"), first);
}

TEST_F(TraceFiles, HaveTheStepsOfACpu) {
  test::trace_steps(*make_backend("cpu"), folder_.path());
  test::expect_traced_steps(folder_.path());
}

// A run that goes on at step 3, and ends with step 5.
TEST_F(TraceFiles, NameTheStepsThatAreInThem) {
  RunConfig config;
  config.training.trace = TraceConfig{.steps = {2, 9}};
  config.training.steps = 5;
  config.logging.dir = folder_.path();
  const auto device = make_backend("cpu");
  const Communicator alone;
  const auto now = [] { return std::chrono::system_clock::now().time_since_epoch() / std::chrono::microseconds(1); };
  const int64_t before = now();
  RunTrace trace(config, *device, alone);
  for (int64_t step = 3; step <= 5; ++step) {
    trace.begin_step(step, [] {});
    const TraceSpan whole(Track::step, "step", step);
  }
  trace.end([] {});
  const json events = json::parse(read_file(joined_trace(folder_.path())));
  EXPECT_THAT(events[0]["args"]["attempt"].get<int64_t>(), AllOf(Ge(before), Le(now())));
  EXPECT_EQ(events[0]["args"]["first"], 3);
  EXPECT_EQ(events[0]["args"]["last"], 5);
}

// A file that cannot be made costs the trace, not the run.
TEST_F(TraceFiles, ThatCannotBeMadeAreAWarning) {
  test::write_file(folder_ / "file", "");
  test::trace_steps(*make_backend("cpu"), folder_.path() / "file");
  EXPECT_FALSE(tracing());
}

}  // namespace mantissa::run_trace_test
