#include "mantissa/base/trace.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "metrics/run_trace.h"

namespace mantissa::trace_test {

using ::testing::IsEmpty;
using ::testing::SizeIs;

nlohmann::json events(int rank = 0) { return nlohmann::json::parse(finish_trace(rank)).at("traceEvents"); }

TEST(Trace, KeepsNothingUnlessStarted) {
  EXPECT_FALSE(tracing());
  { const TraceSpan span(Track::compute, "gemm"); }
  EXPECT_THAT(events(), IsEmpty());
  start_trace();
  EXPECT_TRUE(tracing());
  { const TraceSpan span(Track::compute, "gemm"); }
  EXPECT_THAT(events(), SizeIs(1));
  EXPECT_FALSE(tracing());
  EXPECT_THAT(events(), IsEmpty()) << "spans are forgotten";
}

TEST(Trace, HoldsSpansOfEveryThreadWithTheirTimes) {
  start_trace();
  {
    const TraceSpan outer(Track::compute, "backward");
    std::thread([] { const TraceSpan span(Track::communication, "gradients", 4096); }).join();
    const TraceSpan inner(Track::wait, "wait");
  }
  const nlohmann::json all = events(3);
  ASSERT_THAT(all, SizeIs(3));
  const auto &sent = all[0], &inner = all[1], &outer = all[2];  // in the order of their ends
  EXPECT_EQ(sent.at("name"), "gradients");
  EXPECT_EQ(sent.at("cat"), "communication");
  EXPECT_EQ(sent.at("args").at("bytes"), 4096);
  EXPECT_EQ(inner.at("cat"), "wait");
  EXPECT_EQ(outer.at("cat"), "compute");
  EXPECT_EQ(inner.at("tid"), outer.at("tid"));
  EXPECT_NE(sent.at("tid"), outer.at("tid"));
  const auto begin = [](const nlohmann::json& span) { return span.at("ts").get<double>(); };
  const auto end = [&](const nlohmann::json& span) { return begin(span) + span.at("dur").get<double>(); };
  EXPECT_LE(begin(outer), begin(sent));
  EXPECT_LE(end(sent), begin(inner) + 0.01);  // a microsecond has three digits behind the point
  EXPECT_LE(end(inner), end(outer) + 0.01);
  for (const nlohmann::json& span : all) {
    EXPECT_EQ(span.at("ph"), "X");
    EXPECT_EQ(span.at("pid"), 3);
  }
}

}  // namespace mantissa::trace_test
